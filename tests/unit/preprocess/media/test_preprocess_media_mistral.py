"""Images in chats of Mistral's models: the tokens are those of mistral-common's own encoder."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest
from mistral_common.protocol.instruct.request import ChatCompletionRequest
from mistral_common.tokens.tokenizers import image as mistral_image
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer as Reference

from services.common.models import DEFAULT_SOURCE, resolve
from services.common.packing import pack_u32, unpack_u32
from services.preprocess.media.expansion import CountedItem, expand
from services.preprocess.media.images import ImageFacts
from services.preprocess.protocol import ChatRequest
from services.preprocess.tokenizers.mistral import MistralTokenizer
from tests.support.data.images import image_file

SIZES = [(1, 1), (16, 16), (17, 16), (100, 80), (1024, 1024), (1025, 700), (1600, 1200), (33, 3000)]
TEXT = {"type": "text", "text": "What is it? [IMG] [IMG_END]"}


@pytest.fixture(scope="module")
def tokenizer() -> MistralTokenizer:
    return MistralTokenizer(resolve(DEFAULT_SOURCE))


@pytest.mark.parametrize("order", ["image first", "text first", "two images", "two turns"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_mistral_images_ids_equal_those_of_mistral_common(
    tokenizer: MistralTokenizer, size: tuple[int, int], order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Only the pixels need OpenCV.
    monkeypatch.setattr(mistral_image, "transform_image", lambda image, size: np.zeros((3, *size)))
    sizes = [size] if order.endswith("first") else [size, (64, 48)]
    ours, theirs = chats(order, sizes)
    reference = Reference.from_file(str(resolve(DEFAULT_SOURCE)))
    expected = reference.encode_chat_completion(ChatCompletionRequest.from_openai(messages=theirs)).tokens
    items = [CountedItem("messages[0]", bytes(16), ImageFacts(*each, "PNG")) for each in sizes]
    assert tokenizer.image_rule is not None
    packed, spans = expand(tokenizer.pack_chat(ChatRequest(ours)), tokenizer.image_rule, items)
    ids = unpack_u32(packed).tolist()
    assert ids == expected
    assert [ids[span.end - 1] for span in spans] == [13] * len(sizes)  # [IMG_END]
    assert [span.unexpanded_ids for span in spans] == [pack_u32([10])] * len(sizes)


def chats(order: str, sizes: list[tuple[int, int]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Returns the same messages with references, and with files for mistral-common."""
    ours: list[dict[str, Any]] = [{"type": "image", "media": index} for index in range(len(sizes))]
    theirs: list[dict[str, Any]] = []
    for size in sizes:
        encoded = base64.b64encode(image_file(*size)).decode()
        theirs.append({"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded}"}})

    def messages(images: list[dict[str, Any]]) -> list[dict[str, Any]]:
        if order == "two turns":
            return [
                {"role": "user", "content": [TEXT, images[0]]},
                {"role": "assistant", "content": "A cat."},
                {"role": "user", "content": [images[1], TEXT]},
            ]
        content = [TEXT, *images] if order == "text first" else [images[0], TEXT, *images[1:]]
        return [{"role": "user", "content": content}]

    return messages(ours), messages(theirs)
