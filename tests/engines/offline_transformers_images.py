"""Chats with pictures, answered by transformers' own processor and `generate`: JSON in and out.

In: {"model": folder, "chats": [{"messages", "files": [base64]}], "max_tokens"}; a picture in the messages is a part
{"type": "image"}. Out: {"outputs": [{"prompt", "token_ids"}]}.
"""

from __future__ import annotations

import base64
import io
import json
import sys
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from PIL import Image
from transformers.image_utils import load_image

from tests.engines.offline_vision import load_processor


class Reference:
    """The library's own processor and `generate`."""

    def __init__(self, folder: str) -> None:
        self.processor = load_processor(folder)
        self.model = transformers.AutoModelForImageTextToText.from_pretrained(folder).eval()

    def prompt(self, chat: list[dict[str, Any]], files: Sequence[bytes]) -> dict[str, Any]:
        """The model's inputs for a chat with pictures."""
        text = self.processor.tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        pictures = [load_image(Image.open(io.BytesIO(data))) for data in files]
        return dict(self.processor(text=text, images=pictures or None, return_tensors="pt"))

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def answer(self, inputs: dict[str, Any], tokens: int) -> list[int]:
        """The greedy continuation."""
        made = self.model.generate(**inputs, max_new_tokens=tokens, do_sample=False)
        found: list[int] = made[0, inputs["input_ids"].shape[1] :].tolist()
        return found


def main() -> None:
    """Reads the chats from standard input."""
    question = json.load(sys.stdin)
    reference = Reference(question["model"])
    outputs = []
    for chat in question["chats"]:
        inputs = reference.prompt(chat["messages"], [base64.b64decode(text) for text in chat["files"]])
        token_ids = reference.answer(inputs, question["max_tokens"])
        outputs.append({"prompt": inputs["input_ids"][0].tolist(), "token_ids": token_ids})
    print(json.dumps({"outputs": outputs}))


if __name__ == "__main__":
    main()
