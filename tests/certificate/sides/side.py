"""The interface of a side, and the JSON form of cases and results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

Case = dict[str, Any]
"""A prompt: {kind: "prompt", model, api, body}; an answer: {kind: "answer", model, tool, reasoning, tools, ids, eos,
finish, kwargs}, where tool and reasoning name the side's parsers."""
Result = dict[str, Any]
"""Of a prompt: {ids, schema}; of an answer: {content, reasoning, calls, finish, reasoning_tokens}; of either:
{refused: why}, or {absent: why} for what a side has not."""


class Side(Protocol):
    """One side of the comparison.

    Attributes:
        name: in the report.
        version: of its packages.
        apis: those of which it makes prompts.
    """

    name: str
    version: str
    apis: frozenset[str]

    def send(self, cases: Sequence[Case]) -> None:
        """Starts a batch."""
        ...

    def receive(self) -> list[Result]:
        """Returns the results of the batch that was sent."""
        ...

    def close(self) -> None: ...
