from __future__ import annotations

import re
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from services.preprocess.engines.image_processor import ModelProcessor

MARK = "<image>"


class Words:
    """A tokenizer of single characters, runs of line breaks and the placeholder."""

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [self.convert_tokens_to_ids(part) for part in re.findall(rf"{MARK}|\n+|.", text)]}

    def convert_tokens_to_ids(self, text: str) -> int:
        if text[0] == "\n":
            return 5000 + len(text)
        return 9999 if text == MARK else ord(text) if len(text) == 1 else 0


class Processor:
    """Replaces each placeholder by as many as the image is wide, in tens of pixels."""

    def __init__(self, around: str = "", most_images: int = 99) -> None:
        self.tokenizer = Words()
        self.image_token, self.video_token, self.size_token = MARK, None, "<size>"
        self._around, self._most_images = around, most_images

    def __call__(self, text: Sequence[str], images: list[Image.Image], return_tensors: str | None) -> dict[str, Any]:
        if return_tensors == "np":
            raise ImportError("only lists")
        if images[0].width > 1000:
            raise ValueError("too wide.")
        few = len(images) <= self._most_images
        counts = iter([image.width // 10 if few else 1 for image in images])
        replaced = re.sub(MARK, lambda _: self._around + MARK * next(counts) + self._around, text[0])
        return {"input_ids": [self.tokenizer(replaced)["input_ids"]]}


def test_ids_are_those_between_the_texts_for_each_size() -> None:
    made = ModelProcessor(Processor(around="|"))
    assert made.placeholders == [MARK, "<size>"]
    assert made.problem(MARK) == ""
    assert made.answer(MARK, 30, 5) == {"ids": [ord("|"), 9999, 9999, 9999, ord("|")]}
    assert made.answer(MARK, 2000, 5) == {"refused": "too wide"}


@pytest.mark.parametrize(
    ("processor", "problem"),
    [(Processor(around="\n"), "depend on the text"), (Processor(most_images=1), "or on other images")],
)
def test_tokens_that_depend_on_more_than_the_size_are_a_problem(processor: Processor, problem: str) -> None:
    assert problem in ModelProcessor(processor).problem(MARK)


def test_placeholder_of_several_tokens_is_a_problem() -> None:
    made = ModelProcessor(SimpleNamespace(tokenizer=Words(), image_token="[img]"))
    assert made.problem("[img]") == "its placeholder is not one token"
