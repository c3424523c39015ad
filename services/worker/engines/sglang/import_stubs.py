"""Stand-ins for packages that SGLang imports at once and that exist for GPUs only; they come before SGLang."""

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

from services.common.stub_modules import stand_in_for_absent

IMAGE_AND_SOUND = ("torchvision", "torchaudio")
KERNELS = "sgl_kernel"


def install() -> None:
    """Makes SGLang importable where torch has no GPU; changes nothing where the packages are there. Works once.

    Image and sound libraries are only named while text models are imported. A kernel is different: one that is called
    and does nothing would give wrong numbers, so those fail by name.
    """
    stand_in_for_absent(*IMAGE_AND_SOUND)
    if importlib.util.find_spec(KERNELS) is None:
        os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
        # What SGLang says about every model and number format that needs them is of no use to anyone.
        logging.getLogger("sglang.srt.models.registry").setLevel(logging.ERROR)
        warnings.filterwarnings("ignore", category=UserWarning, module=r"sglang\.")
        sys.meta_path.append(_KernelFinder())


def forgo_pinned_memory() -> None:
    """Where torch has no accelerator it refuses to pin memory for one, which SGLang's adapters ask for all the same."""
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
    """A name of that package, and whatever hangs on it: there to be named, not to be called."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __getattr__(self, name: str) -> _Kernel:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Kernel(f"{self.__name__}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(f"{self.__name__} needs the package {KERNELS}, which is not installed")


class _Kernels(types.ModuleType):
    """The package, and every module in it."""

    __path__: list[str] = []  # noqa: RUF012 - a package without files

    def __getattr__(self, name: str) -> _Kernel:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Kernel(f"{self.__name__}.{name}")


class _KernelFinder(MetaPathFinder, Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        ours = fullname.partition(".")[0] == KERNELS
        return ModuleSpec(fullname, self, is_package=True) if ours else None

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return _Kernels(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        return None
