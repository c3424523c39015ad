"""Fields of engines' own sampling parameters: what sets each, in words for the documentation."""

from __future__ import annotations

from collections.abc import Mapping

ENGINE_OPTIONS = "engine_options"
TEXT = "*text*"
WORKER = "*worker*"
REFUSED = "*refused*"
INTERNAL = "*internal*"
NOT_OURS = frozenset({TEXT, WORKER, REFUSED, INTERNAL})
"""Text: postprocess does it, and stops the engine. Worker: always the same here. Internal: set by the engine itself."""


def set_by(fields: Mapping[str, str], what: str) -> frozenset[str]:
    """The fields that are set so."""
    return frozenset(name for name, by in fields.items() if by == what)


def fields_table(title: str, fields: Mapping[str, str]) -> str:
    """Markdown: what sets each field."""
    lines = [f"| {title} | set by |", "| --- | --- |"]
    lines += [f"| `{name}` | {by if by in NOT_OURS else f'`{by}`'} |" for name, by in fields.items()]
    return "\n".join(lines) + "\n"
