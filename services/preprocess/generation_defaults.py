"""What a model's generation_config.json recommends for whatever a client leaves unset, read as engines read it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

log = logging.getLogger(__name__)

MOST_EOS_IDS = 64
"""They come with every prompt."""


@dataclass(frozen=True)
class GenerationDefaults:
    """Recommended options; None where the files say nothing. Ranges are those of `SamplingOptions` in common.proto."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None


NO_DEFAULTS = GenerationDefaults()


def generation_defaults(config: Mapping[str, Any]) -> GenerationDefaults:
    """Reads the content of a generation_config.json; what no engine could honour is left out, with a line in the log.

    `do_sample` is not read: engines sample at whatever temperature they are given.
    """
    return GenerationDefaults(
        temperature=_within(config, "temperature", 0, 100),
        top_p=_within(config, "top_p", 1e-6, 1),
        top_k=_whole(config, "top_k", -1),
        min_p=_within(config, "min_p", 0, 1),
        repetition_penalty=_within(config, "repetition_penalty", 1e-6, 100),
        max_tokens=_whole(config, "max_new_tokens", 1),
    )


def eos_ids(*listed: Any) -> tuple[int, ...]:
    """The ids among what files give as such, a number or a list each; what cannot be an id is left out."""
    flat = (one for each in listed for one in (each if isinstance(each, list) else [each]))
    found = dict.fromkeys(
        one for one in flat if isinstance(one, int) and not isinstance(one, bool) and 0 <= one < 1 << 31
    )
    return tuple(found)[:MOST_EOS_IDS]


def _within(config: Mapping[str, Any], name: str, least: float, most: float) -> float | None:
    value = config.get(name)
    if isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most:
        return float(value)
    _say_unusable(name, value)
    return None


def _whole(config: Mapping[str, Any], name: str, least: int) -> int | None:
    value = config.get(name)
    if isinstance(value, int) and not isinstance(value, bool) and least <= value < 1 << 31:
        return value
    _say_unusable(name, value)
    return None


def _say_unusable(name: str, value: Any) -> None:
    if value is not None:
        log.warning("generation_config.json: a value is out of range", extra={"option": name, "value": str(value)[:40]})
