"""The libraries that turn text into ids, behind one interface."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from services.preprocess.encoders.samples import SAMPLES

log = logging.getLogger(__name__)


class Backend(Protocol):
    """Encodes text. Called from several threads at once."""

    name: str

    def encode(self, texts: Sequence[str]) -> list[bytes]:
        """Packed u32 ids of each text by itself, nothing added; ValueError or TypeError for what is no Unicode."""
        ...


def fastest(reference: Backend, make: Callable[[], Backend], extra_samples: Sequence[str] = ()) -> Backend:
    """The backend that `make` gives, where it is there and agrees with the reference on every sample.

    Args:
        reference: the engine's own library.
        make: loads the faster one; ImportError when it is not installed.
        extra_samples: texts to compare beside the usual ones, such as the tokenizer's own control tokens.
    """
    try:
        fast = make()
    except ImportError:
        return reference
    except (ValueError, TypeError, OSError, RuntimeError) as error:
        log.info("a faster tokenizer cannot read these files", extra={"reason": str(error)[:200]})
        return reference
    samples = [*SAMPLES, *extra_samples]
    if difference := _difference(reference, fast, samples):
        log.warning("a faster tokenizer gives other ids and is not used", extra={"backend": fast.name, **difference})
        return reference
    return Guarded(fast, reference)


def _difference(reference: Backend, fast: Backend, samples: Sequence[str]) -> dict[str, str]:
    """Empty when they agree on every sample, alone and in a batch."""
    expected = reference.encode(samples)
    try:
        together = fast.encode(samples)
        for sample, wanted, got in zip(samples, expected, together, strict=True):
            if wanted != got or fast.encode([sample]) != [wanted]:
                return {"sample": sample[:80]}
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        return {"failure": type(error).__name__}
    return {}


class Guarded(Backend):
    """A fast backend with the reference behind it, for texts that the fast one refuses or fails on."""

    def __init__(self, fast: Backend, reference: Backend) -> None:
        self.name = fast.name
        self._fast = fast
        self._reference = reference

    def encode(self, texts: Sequence[str]) -> list[bytes]:
        """See Backend."""
        try:
            return self._fast.encode(texts)
        except BaseException as error:  # native code panics with what is no Exception
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            return self._reference.encode(texts)
