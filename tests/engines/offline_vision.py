"""What transformers makes of a vision-language model: ``python offline_vision.py FOLDER`` prints a JSON document.

Runs without torchvision, so with Pillow's image processors and without a video processor.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import transformers
from PIL import Image


def load_processor(folder: str) -> Any:
    """The model's processor, without the video processor where it has one."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    images = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
    if images.__class__.__name__ != "Qwen2VLImageProcessorPil":
        return transformers.AutoProcessor.from_pretrained(folder)

    class WithoutVideo(transformers.Qwen2VLProcessor):  # type: ignore[misc]
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            return argument and super().check_argument_for_proper_class(argument_name, argument)

    return WithoutVideo(image_processor=images, tokenizer=tokenizer, video_processor=None)


@torch.no_grad()  # type: ignore[untyped-decorator]
def main() -> None:
    """Asks about two pictures, in both orders."""
    folder = sys.argv[1]
    processor = load_processor(folder)
    model, loading = transformers.AutoModelForImageTextToText.from_pretrained(folder, output_loading_info=True)
    pictures = [Image.new("RGB", (100, 80), "red"), Image.new("RGB", (90, 160), "blue")]
    part = {"type": "image"}
    chat = [{"role": "user", "content": [part, {"type": "text", "text": "What is it?"}, part]}]
    text = processor.tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    prompts, answers = [], []
    for order in (pictures, pictures, pictures[::-1]):
        inputs = processor(text=text, images=order, return_tensors="pt")
        prompts.append(inputs["input_ids"][0].tolist())
        made = model.generate(**inputs, max_new_tokens=8, do_sample=False)
        answers.append(made[0, len(prompts[-1]) :].tolist())
    sizes = [(picture.height, picture.width) for picture in pictures]
    found = {
        "answers": answers,
        "counted": processor._get_num_multimodal_tokens(image_sizes=sizes)["num_image_tokens"],
        "missing": sorted(loading["missing_keys"]),
        "placeholders": prompts[0].count(processor.image_token_id),
        "unexpected": sorted(loading["unexpected_keys"]),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
