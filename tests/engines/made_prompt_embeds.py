"""Makes `prompt_embeds` fields of a model's own input embeddings: JSON in, JSON out, run where torch is.

In: {"model": folder, "prompts": [[id, ...], ...], "trap": path}. Out: {"plain": one field for each prompt, and one
field of the first prompt for each other way to save it}. Running a trap's pickle creates the file at `trap`.
"""

from __future__ import annotations

import base64
import io
import json
import pickle
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file


class Trap:
    """Makes a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (self._path, "w")


def saved(thing: Any, **options: Any) -> str:
    """As clients send it."""
    buffer = io.BytesIO()
    torch.save(thing, buffer, **options)
    return base64.b64encode(buffer.getvalue()).decode()


def main() -> None:
    """Reads the question from standard input."""
    question = json.load(sys.stdin)
    matrix = load_file(str(Path(question["model"]) / "model.safetensors"))["model.embed_tokens.weight"]
    made = [matrix[torch.tensor(prompt)] for prompt in question["prompts"]]
    first = made[0]
    broken = first.clone()
    broken[0, 0] = torch.nan
    trap = Trap(question["trap"])
    answer = {
        "plain": [saved(rows) for rows in made],
        "batch": saved(first[None]),
        "part": saved(torch.cat([torch.zeros(3, first.shape[1]), first])[3:]),
        "learnt": saved(first.clone().requires_grad_()),
        "double": saved(first.double()),
        "half": saved(first.half()),
        "half_widened": saved(first.half().float()),
        "bfloat16": saved(first.bfloat16()),
        "bfloat16_widened": saved(first.bfloat16().float()),
        "narrow": saved(first[:, :-1].contiguous()),
        "wide": saved(torch.cat([first, first], dim=1)),
        "not_finite": saved(broken),
        "turned": saved(first.T.contiguous().T),
        "too_long": saved(first[:1].expand(2_048, -1).contiguous()),
        "whole_numbers": saved(torch.ones(first.shape, dtype=torch.int64)),
        "vector": saved(first[0].clone()),
        "list": saved([first]),
        "sparse": saved(first.to_sparse()),
        "old_format": saved(first, _use_new_zipfile_serialization=False),
        "trap": saved(trap),
        "trap_beside": saved([first, trap]),
        "trap_alone": base64.b64encode(pickle.dumps(trap)).decode(),
    }
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
