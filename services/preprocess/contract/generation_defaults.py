"""Reads the sampling defaults in a model's generation_config.json the way engines do."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.common.types.sampling import DEFAULTED, SamplingParams

log = logging.getLogger(__name__)

MAX_EOS_IDS = 64
"""End ids of a model, which are sent with every prompt; further ones are ignored."""


@dataclass(frozen=True)
class GenerationDefaults:
    """Recommended options; None if the files do not set them. Ranges are those of `SamplingOptions` in common.proto."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None

    @property
    def sampling(self) -> SamplingParams:
        """The options about sampling."""
        return SamplingParams(**{name: getattr(self, name) for name in DEFAULTED})


NO_DEFAULTS = GenerationDefaults()


def generation_defaults(config: Mapping[str, Any]) -> GenerationDefaults:
    """Reads the content of a generation_config.json; values that no engine accepts are dropped with a warning.

    `do_sample` is ignored: engines sample at the given temperature.
    """
    return GenerationDefaults(
        temperature=_number(config, "temperature", 0, 100),
        top_p=_number(config, "top_p", 1e-6, 1),
        top_k=_integer(config, "top_k", -1),
        min_p=_number(config, "min_p", 0, 1),
        repetition_penalty=_number(config, "repetition_penalty", 1e-6, 100),
        max_tokens=_integer(config, "max_new_tokens", 1),
    )


def eos_ids(*listed: Any) -> tuple[int, ...]:
    """Returns the end-of-sequence ids among the given numbers and lists; invalid ids are dropped."""
    flat = (entry for item in listed for entry in (item if isinstance(item, list) else [item]))
    ids = dict.fromkeys(
        entry for entry in flat if isinstance(entry, int) and not isinstance(entry, bool) and 0 <= entry < 1 << 31
    )
    return tuple(ids)[:MAX_EOS_IDS]


def _number(config: Mapping[str, Any], name: str, least: float, most: float) -> float | None:
    value = config.get(name)
    if isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most:
        return float(value)
    _warn(name, value)
    return None


def _integer(config: Mapping[str, Any], name: str, least: int) -> int | None:
    value = config.get(name)
    if isinstance(value, int) and not isinstance(value, bool) and least <= value < 1 << 31:
        return value
    _warn(name, value)
    return None


def _warn(name: str, value: Any) -> None:
    if value is not None:
        log.warning("generation_config.json: a value is out of range", extra={"option": name, "value": str(value)[:40]})
