"""Documents what sets each field of an engine's sampling parameters."""

from __future__ import annotations

from collections.abc import Mapping

ENGINE_OPTIONS = "engine_options"
TEXT = "*text*"
WORKER = "*worker*"
REFUSED = "*refused*"
INTERNAL = "*internal*"
NOT_OURS = frozenset({TEXT, WORKER, REFUSED, INTERNAL})
"""TEXT: handled by postprocessing, which stops the engine. WORKER: a constant. INTERNAL: set by the engine itself."""


def set_by(fields: Mapping[str, str], source: str) -> frozenset[str]:
    """Returns the fields set by `source`."""
    return frozenset(name for name, by in fields.items() if by == source)


def fields_table(title: str, fields: Mapping[str, str]) -> str:
    """Returns a Markdown table of the fields and what sets each of them."""
    lines = [f"| {title} | set by |", "| --- | --- |"]
    lines += [f"| `{name}` | {by if by in NOT_OURS else f'`{by}`'} |" for name, by in fields.items()]
    return "\n".join(lines) + "\n"
