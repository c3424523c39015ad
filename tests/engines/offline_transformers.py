"""What transformers' own generate makes of prompts, one at a time: a JSON document in, one out (see engine_suite)."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM


def merge_adapter(model: Any, folder: Path) -> None:
    """Adds a LoRA adapter to the weights themselves."""
    config = json.loads((folder / "adapter_config.json").read_text("utf-8"))
    tensors = load_file(folder / "adapter_model.safetensors")
    for key, down in tensors.items():
        if key.endswith(".lora_A.weight"):
            up = tensors[key.replace("lora_A", "lora_B")]
            layer = model.get_submodule(key.removeprefix("base_model.model.").removesuffix(".lora_A.weight"))
            layer.weight.data += config["lora_alpha"] / config["r"] * (up @ down)


@torch.no_grad()  # type: ignore[untyped-decorator]
def main() -> None:
    """Reads the question from standard input."""
    question = json.load(sys.stdin)
    model = AutoModelForCausalLM.from_pretrained(question["model"])
    if "adapter" in question:
        merge_adapter(model, Path(question["adapter"]))
    outputs, embeddings = [], []
    for prompt in question["prompts"]:
        ids = torch.tensor([prompt])
        made = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=question["max_tokens"],
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        rows = [torch.log_softmax(row[0].float(), -1) for row in made.logits]
        count = question.get("logprobs", 0)
        tops = [row.topk(count) for row in rows] if count else []
        outputs.append(
            {
                "token_ids": made.sequences[0, len(prompt) :].tolist(),
                "logprobs": [
                    dict(zip(map(str, top.indices.tolist()), top.values.tolist(), strict=True)) for top in tops
                ],
            }
        )
        if question.get("embed"):
            last = model.model(input_ids=ids).last_hidden_state[0, -1]
            embeddings.append(torch.nn.functional.normalize(last, dim=-1).tolist())
    print(json.dumps({"outputs": outputs, "embeddings": embeddings}))


main()
