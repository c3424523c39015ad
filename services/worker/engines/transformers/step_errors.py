"""What an exception in a step means: for one request, for all of the step, or for the device."""

from __future__ import annotations

from services.common.base.errors import STEP_FAILED, ErrorKind, SluiceError

_DEVICE_SIGNS = ("CUDA error", "HIP error", "device-side assert", "an illegal memory access", "NCCL error")
_MEMORY_SIGNS = ("out of memory", "can't allocate memory", "cannot allocate memory")


def is_device_lost(error: BaseException) -> bool:
    """Returns whether the device can compute nothing more in this process, so that every later step fails as well."""
    if is_out_of_memory(error):
        return False
    return type(error).__name__ == "AcceleratorError" or any(sign in str(error) for sign in _DEVICE_SIGNS)


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether memory was insufficient, on the device or the host."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in _MEMORY_SIGNS)


def row_failed(error: Exception) -> SluiceError:
    """Returns the error of a request that raised by itself; another worker would fail on it as well."""
    if isinstance(error, SluiceError):
        return error
    return SluiceError(ErrorKind.INTERNAL, "The engine failed on this request; see the worker's log.")


def step_failed(error: Exception) -> SluiceError:
    """Returns the error of all requests of a step that failed as a whole; another worker may compute them."""
    if isinstance(error, SluiceError):
        return error
    why = "ran out of memory in" if is_out_of_memory(error) else "failed in"
    return SluiceError(
        ErrorKind.UNAVAILABLE,
        f"The engine {why} a step that computed this request; retry, or send a shorter prompt.",
        code=STEP_FAILED,
    )
