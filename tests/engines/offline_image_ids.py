"""The ids that a model's own processor makes: ``python offline_image_ids.py FOLDER``.

Reads {"sizes": [[width, height], …], "prompts": [{"messages": …, "sizes": …}, …]} from standard input, and prints the
number of tokens of each size, null where the processor refuses it, and the ids of each prompt.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from offline_vision import load_processor  # type: ignore[import-not-found]
from PIL import Image


def count(processor: Any, width: int, height: int) -> int | None:
    """Returns the tokens of an image; None for a size that the processor refuses."""
    try:
        return int(processor._get_num_multimodal_tokens(image_sizes=[(height, width)])["num_image_tokens"][0])
    except ValueError:
        return None


def main() -> None:
    """Answers one request."""
    processor = load_processor(sys.argv[1])
    request = json.load(sys.stdin)
    ids = []
    for prompt in request["prompts"]:
        text = processor.tokenizer.apply_chat_template(prompt["messages"], add_generation_prompt=True, tokenize=False)
        images = [Image.new("RGB", (width, height), "red") for width, height in prompt["sizes"]]
        ids.append(processor(text=text, images=images, return_tensors="np")["input_ids"][0].tolist())
    print(json.dumps({"counts": [count(processor, *size) for size in request["sizes"]], "ids": ids}))


if __name__ == "__main__":
    main()
