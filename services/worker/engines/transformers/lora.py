"""LoRA adapters in PEFT's format; each token of a batch uses the adapter of its request."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from services.common.base.errors import SluiceError, invalid

_PREFIX, _DOWN, _UP = "base_model.model.", ".lora_A.weight", ".lora_B.weight"


@dataclass(frozen=True, slots=True)
class Adapter:
    """Low-rank weight pairs of one adapter by module name: down [rank, in], and up [out, rank] times the scale."""

    pairs: dict[str, tuple[torch.Tensor, torch.Tensor]]


class Adapters:
    """The adapters of one model. `select` applies to the calling thread; other threads use the base model."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._loaded: dict[str, Adapter] = {}
        self._thread = threading.local()

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the loaded adapters, sorted."""
        return tuple(sorted(self._loaded))

    def load(self, name: str, folder: Path) -> None:
        """Loads an adapter, which is slow; call it between two steps.

        Raises:
            SluiceError: INVALID_ARGUMENT when the folder contains no adapter for this model.
        """
        adapter = _read(folder, name, self._model)
        for module_name in adapter.pairs:
            self._wrap(module_name)
        self._loaded[name] = adapter

    def unload(self, name: str) -> None:
        """Removes an adapter that no request uses."""
        self._loaded.pop(name, None)

    def select(self, lengths: Sequence[tuple[str, int]]) -> None:
        """Sets the adapters of the calling thread's next forward pass: names with token counts, in batch order."""
        spans: list[tuple[int, int, Adapter]] = []
        start = 0
        for name, length in lengths:
            if name and (adapter := self._loaded.get(name)) is not None:
                spans.append((start, start + length, adapter))
            start += length
        self._thread.spans = spans

    def add_to(self, module_name: str, inputs: torch.Tensor, outputs: torch.Tensor) -> torch.Tensor:
        """Adds the selected adapters' contributions to a linear layer's outputs [1, tokens, out], in place."""
        for start, end, adapter in getattr(self._thread, "spans", ()):
            if (pair := adapter.pairs.get(module_name)) is not None:
                down, up = pair
                outputs[:, start:end] += inputs[:, start:end] @ down.T @ up.T
        return outputs

    def _wrap(self, module_name: str) -> None:
        parent_name, _, name = module_name.rpartition(".")
        parent = self._model.get_submodule(parent_name)
        layer = getattr(parent, name)
        if not isinstance(layer, _Adapted):
            setattr(parent, name, _Adapted(layer, module_name, self))


class _Adapted(torch.nn.Module):  # type: ignore[misc]
    """Wraps a linear layer and adds the selected adapters to its outputs."""

    def __init__(self, base: Any, name: str, adapters: Adapters) -> None:
        super().__init__()
        self.base = base
        self._name = name
        self._adapters = adapters

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self._adapters.add_to(self._name, inputs, self.base(inputs))


def _read(folder: Path, name: str, model: Any) -> Adapter:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        config = json.loads((folder / "adapter_config.json").read_text("utf-8"))
        tensors = load_file(folder / "adapter_model.safetensors")
        rank, alpha = int(config["r"]), float(config["lora_alpha"])
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise _unusable(name, f"{folder} contains no valid adapter ({type(error).__name__})") from error
    if config.get("use_dora") or config.get("bias", "none") != "none" or config.get("modules_to_save"):
        raise _unusable(name, "it uses DoRA, biases or modules_to_save, which this engine does not support")
    scale = alpha / (rank**0.5 if config.get("use_rslora") else rank)
    pairs: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for key in tensors:
        if not key.endswith(_DOWN):
            if not key.endswith(_UP):
                raise _unusable(name, f"it contains {key}, and only LoRA on linear layers is supported")
            continue
        module_name = key.removeprefix(_PREFIX).removesuffix(_DOWN)
        down, up = tensors[key], tensors.get(key.replace(_DOWN, _UP))
        layer = _linear(model, module_name)
        if layer is None or up is None or (up.shape[0], down.shape[1]) != tuple(layer.weight.shape):
            raise _unusable(name, f"its module {module_name} does not match this model")
        to = {"device": layer.weight.device, "dtype": layer.weight.dtype}
        pairs[module_name] = (down.to(**to), (up * scale).to(**to))
    return Adapter(pairs)


def _linear(model: Any, name: str) -> Any:
    try:
        module = model.get_submodule(name)
    except AttributeError:
        return None
    module = module.base if isinstance(module, _Adapted) else module
    return module if isinstance(module, torch.nn.Linear) else None


def _unusable(name: str, why: str) -> SluiceError:
    return invalid(f"LoRA adapter {name!r} cannot be loaded: {why}.", param="adapters", code="adapter_unusable")
