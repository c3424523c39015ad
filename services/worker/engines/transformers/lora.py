"""LoRA adapters in PEFT's format, chosen per request: every token of a batch goes through its own request's adapter."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from services.common.errors import SluiceError, invalid

_PREFIX, _DOWN, _UP = "base_model.model.", ".lora_A.weight", ".lora_B.weight"


@dataclass(frozen=True, slots=True)
class Adapter:
    """The low-rank pairs of one adapter by module name: down [rank, in], up [out, rank] times the scale."""

    pairs: dict[str, tuple[torch.Tensor, torch.Tensor]]


class Adapters:
    """The adapters of one model. `select` belongs to the step thread; other threads see the base model."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._loaded: dict[str, Adapter] = {}
        self._now = threading.local()

    @property
    def names(self) -> tuple[str, ...]:
        """Adapters that can be asked for, sorted."""
        return tuple(sorted(self._loaded))

    def load(self, name: str, folder: Path) -> None:
        """Reads an adapter; slow. Call it while the model is not stepping.

        Raises:
            SluiceError: INVALID_ARGUMENT when the folder holds no adapter, or none for this model.
        """
        adapter = _read(folder, name, self._model)
        for module_name in adapter.pairs:
            self._wrap(module_name)
        self._loaded[name] = adapter

    def unload(self, name: str) -> None:
        """Forgets an adapter that no request uses."""
        self._loaded.pop(name, None)

    def select(self, lengths: Sequence[tuple[str, int]]) -> None:
        """Says whose tokens come next in the calling thread's forward pass: adapter and number of tokens, in order."""
        spans: list[tuple[int, int, Adapter]] = []
        start = 0
        for name, length in lengths:
            if name and (adapter := self._loaded.get(name)) is not None:
                spans.append((start, start + length, adapter))
            start += length
        self._now.spans = spans

    def add_to(self, module_name: str, inputs: torch.Tensor, outputs: torch.Tensor) -> torch.Tensor:
        """Adds to a linear layer's outputs [1, tokens, out] what the selected adapters make of its inputs."""
        for start, end, adapter in getattr(self._now, "spans", ()):
            if (pair := adapter.pairs.get(module_name)) is not None:
                down, up = pair
                outputs[:, start:end] += inputs[:, start:end] @ down.T @ up.T
        return outputs

    def _wrap(self, module_name: str) -> None:
        parent_name, _, own = module_name.rpartition(".")
        parent = self._model.get_submodule(parent_name)
        if not isinstance(getattr(parent, own), _Adapted):
            setattr(parent, own, _Adapted(getattr(parent, own), module_name, self))


class _Adapted(torch.nn.Module):  # type: ignore[misc]
    """A linear layer that listens to the adapters."""

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
        raise _refused(name, f"{folder} holds no adapter that can be read ({type(error).__name__})") from error
    if config.get("use_dora") or config.get("bias", "none") != "none" or config.get("modules_to_save"):
        raise _refused(name, "it uses DoRA, biases or modules_to_save, which this engine does not have")
    scale = alpha / (rank**0.5 if config.get("use_rslora") else rank)
    pairs: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for key in tensors:
        if not key.endswith(_DOWN):
            if not key.endswith(_UP):
                raise _refused(name, f"it holds {key}, which is no part of LoRA on linear layers")
            continue
        module_name = key.removeprefix(_PREFIX).removesuffix(_DOWN)
        down, up = tensors[key], tensors.get(key.replace(_DOWN, _UP))
        layer = _linear(model, module_name)
        if layer is None or up is None or (up.shape[0], down.shape[1]) != tuple(layer.weight.shape):
            raise _refused(name, f"its {module_name} does not fit this model")
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


def _refused(name: str, why: str) -> SluiceError:
    return invalid(f"LoRA adapter {name!r} cannot be loaded: {why}.", param="adapters", code="adapter_unusable")
