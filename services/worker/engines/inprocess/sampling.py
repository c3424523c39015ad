"""Parts of the mapping of requests that do not depend on the engine, and tables of what sets each parameter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from services.common.types.sampling import SCALARS
from services.worker.contract.capabilities import SAMPLING, Capability
from services.worker.contract.generation import GenerateRequest, StopParams

ENGINE_OPTIONS = "engine_options"
TEXT = "*text*"
WORKER = "*worker*"
REFUSED = "*refused*"
INTERNAL = "*internal*"
NOT_OURS = frozenset({TEXT, WORKER, REFUSED, INTERNAL})
"""TEXT: handled by postprocessing, which stops the engine. WORKER: a constant. INTERNAL: set by the engine itself."""


@dataclass(frozen=True, slots=True)
class Facts:
    """Properties of the started engine that the mapping needs.

    Attributes:
        context_length: Maximum number of prompt and output tokens.
        defaults: Sampling options of the model's generation config.
    """

    context_length: int
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def room(self, request: GenerateRequest) -> int:
        """Returns the number of tokens that fit into the context after the prompt."""
        length = request.embeds.length if request.embeds is not None else len(request.token_ids)
        return self.context_length - length


def same_name(fields: Mapping[str, str]) -> tuple[str, ...]:
    """Returns the numbers among the sampling parameters that an engine takes under their own names."""
    return tuple(name for name in SCALARS if fields.get(name) == name)


def sampling_of(fields: Mapping[str, str]) -> frozenset[Capability]:
    """Returns the sampling and stop options that set a field of an engine's parameters."""
    return SAMPLING & frozenset(fields.values())


def output_limit(stop: StopParams, room: int) -> int:
    """Returns the maximum number of output tokens."""
    return room if stop.max_tokens is None else min(stop.max_tokens, room)


def stop_ids(stop: StopParams) -> frozenset[int]:
    """Returns the token ids that end the request."""
    return stop.stop_token_ids - frozenset(stop.eos_token_ids) if stop.ignore_eos else stop.stop_token_ids


def set_by(fields: Mapping[str, str], source: str) -> frozenset[str]:
    """Returns the fields set by `source`."""
    return frozenset(name for name, by in fields.items() if by == source)


def fields_table(title: str, fields: Mapping[str, str]) -> str:
    """Returns a Markdown table of the fields and what sets each of them."""
    lines = [f"| {title} | set by |", "| --- | --- |"]
    lines += [f"| `{name}` | {by if by in NOT_OURS else f'`{by}`'} |" for name, by in fields.items()]
    return "\n".join(lines) + "\n"
