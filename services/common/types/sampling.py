"""How a generation samples, and what constrains it: defined once for the gateway, the workers and their engines."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters; None uses the model's generation defaults, then the engine's.

    A new one is a line here and in `SamplingOptions` of common.proto, a capability, the field of an API, and a line in
    the table of each engine that has it; messages, checks and tables follow from its name.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    logit_bias: dict[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    thinking_token_budget: int | None = None
    engine_options: Mapping[str, Any] = field(default_factory=dict)

    def or_else(self, defaults: SamplingParams) -> SamplingParams:
        """Returns these parameters with unset ones of DEFAULTED taken from `defaults`."""
        if defaults is UNSET:
            return self
        unset = {
            name: value
            for name in DEFAULTED
            if getattr(self, name) is None and (value := getattr(defaults, name)) is not None
        }
        return replace(self, **unset) if unset else self

    def used(self) -> Iterator[str]:
        """Yields the names of the parameters that have an effect."""
        for name in NAMES:
            value = getattr(self, name)
            if value is not None and value not in _WITHOUT_EFFECT.get(name, ((), {})):
                yield name

    def given(self, names: tuple[str, ...]) -> dict[str, Any]:
        """Returns parameters by name, without those that are None."""
        return {name: value for name in names if (value := getattr(self, name)) is not None}


UNSET = SamplingParams()
NAMES = tuple(parameter.name for parameter in fields(SamplingParams))
SCALARS = tuple(parameter.name for parameter in fields(SamplingParams) if parameter.default is None)
"""Parameters that are numbers."""
DEFAULTED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Parameters for which a model's files may recommend a default."""
RANGES: Mapping[str, tuple[float, float]] = {
    "temperature": (0, math.inf),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "frequency_penalty": (-2, 2),
    "presence_penalty": (-2, 2),
    "repetition_penalty": (0, math.inf),
}
"""Bounds of numbers, both included."""
_WITHOUT_EFFECT: Mapping[str, tuple[float, ...]] = {
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
}


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """A constraint on the output. The grammar is a tuple for `choice`, else a text (for the JSON kinds, JSON)."""

    kind: Literal["json_schema", "regex", "ebnf", "choice", "json_object", "structural_tag"]
    grammar: str | tuple[str, ...] = ""
