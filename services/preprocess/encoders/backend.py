"""Libraries that encode text to ids, behind one interface."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from services.preprocess.encoders.samples import SAMPLES

log = logging.getLogger(__name__)

CACHE_OFF = "the cache is off"


@dataclass(frozen=True)
class EncoderOptions:
    """Optimizations to use.

    Attributes:
        fast_backend: use a faster library where it is installed and a self-check confirms equal ids.
        cache_bytes: memory per model for caching the ids of prompt segments; 0 for none.
    """

    fast_backend: bool = True
    cache_bytes: int = 64 << 20


class Backend(Protocol):
    """Encodes text; thread-safe."""

    name: str

    def encode(self, texts: Sequence[str]) -> list[bytes]:
        """Returns packed uint32 ids of each text without special tokens; ValueError, TypeError for invalid Unicode."""
        ...


def fastest(reference: Backend, make: Callable[[], Backend], extra_samples: Sequence[str] = ()) -> Backend:
    """Returns the backend made by `make`, if it is available and matches the reference on every sample.

    Args:
        reference: the engine's own library.
        make: loads the faster backend; raises ImportError when it is not installed.
        extra_samples: further texts to compare, such as the tokenizer's control tokens.
    """
    try:
        fast = make()
    except ImportError:
        return reference
    except (ValueError, TypeError, OSError, RuntimeError) as error:
        log.info("the fast tokenizer cannot read these files", extra={"reason": str(error)[:200]})
        return reference
    samples = [*SAMPLES, *extra_samples]
    if difference := _difference(reference, fast, samples):
        log.warning(
            "the fast tokenizer returns different ids and is not used", extra={"backend": fast.name, **difference}
        )
        return reference
    return Guarded(fast, reference)


def _difference(reference: Backend, fast: Backend, samples: Sequence[str]) -> dict[str, str]:
    """Compares the backends on every sample, alone and in a batch; returns the first difference, empty if none."""
    expected = reference.encode(samples)
    try:
        batch = fast.encode(samples)
        for sample, expected_ids, ids in zip(samples, expected, batch, strict=True):
            if expected_ids != ids or fast.encode([sample]) != [expected_ids]:
                return {"sample": sample[:80]}
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        return {"failure": type(error).__name__}
    return {}


class Guarded(Backend):
    """A fast backend that falls back to the reference for texts it rejects or fails on."""

    def __init__(self, fast: Backend, reference: Backend) -> None:
        self.name = fast.name
        self._fast = fast
        self._reference = reference

    def encode(self, texts: Sequence[str]) -> list[bytes]:
        """Encodes with the fast backend, or with the reference if that fails."""
        try:
            return self._fast.encode(texts)
        except BaseException as error:  # native panics are not subclasses of Exception
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            return self._reference.encode(texts)
