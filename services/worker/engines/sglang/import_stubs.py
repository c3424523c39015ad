"""Stubs for GPU-only packages that SGLang imports unconditionally; install them before importing SGLang."""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
import sys
import types
import warnings
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any, NoReturn

from services.common.packages.engines import stand_in_for_absent

MEDIA_PACKAGES = ("torchvision", "torchaudio")
KERNEL_PACKAGE = "sgl_kernel"
_LOOKED_UP_OPERATORS = (
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
    "fused_sigmoid_mul_cpu",
)
"""Operators that modules with image processors look up while they are imported."""


def install() -> None:
    """Makes SGLang importable without a GPU; has no effect where the packages are installed. Call it once.

    Importing text models references the media packages without calling them. A stub kernel that did nothing would
    produce wrong results, so calling one raises an error.
    """
    stand_in_for_absent(*MEDIA_PACKAGES)
    if importlib.util.find_spec(KERNEL_PACKAGE) is None:
        os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
        # SGLang warns about every model and number format that needs the missing kernels.
        logging.getLogger("sglang.srt.models.registry").setLevel(logging.ERROR)
        warnings.filterwarnings("ignore", category=UserWarning, module=r"sglang\.")
        sys.meta_path.append(_KernelFinder())


@functools.cache
def declare_operators() -> Any:
    """Declares the kernels that processors of images look up on import, without code: calling one raises.

    Without them SGLang logs the failed imports and serves these models without images. Imports torch, so it is called
    when SGLang is about to be imported anyway.

    Returns:
        The declarations, which torch keeps only as long as this object lives; None where the kernels are installed.
    """
    if not any(isinstance(finder, _KernelFinder) for finder in sys.meta_path):
        return None  # the kernels are installed
    import torch

    library = torch.library.Library(KERNEL_PACKAGE, "FRAGMENT")
    for name in _LOOKED_UP_OPERATORS:
        if not hasattr(getattr(torch.ops, KERNEL_PACKAGE), name):
            library.define(f"{name}(Tensor first) -> Tensor")
    return library


def forgo_pinned_memory() -> None:
    """Makes torch ignore `pin_memory` without a GPU, where it would raise; SGLang's LoRA code always requests it."""
    import torch

    if torch.cuda.is_available():
        return

    def unpinned(make: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(make)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            kwargs.pop("pin_memory", None)
            return make(*args, **kwargs)

        return wrapper

    for name in ("arange", "empty", "full", "ones", "tensor", "zeros"):
        setattr(torch, name, unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda tensor, *args, **kwargs: tensor


class _Kernel:
    """Any attribute of the kernel package, at any depth; raises when called."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __getattr__(self, name: str) -> _Kernel:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Kernel(f"{self.__name__}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(f"{self.__name__} needs the package {KERNEL_PACKAGE}; install it or use a CPU backend")


class _Kernels(types.ModuleType):
    """The kernel package and every module in it."""

    __path__: list[str] = []  # noqa: RUF012 - a package without files

    def __getattr__(self, name: str) -> _Kernel:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Kernel(f"{self.__name__}.{name}")


class _KernelFinder(MetaPathFinder, Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        matches = fullname.partition(".")[0] == KERNEL_PACKAGE
        return ModuleSpec(fullname, self, is_package=True) if matches else None

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return _Kernels(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        return None
