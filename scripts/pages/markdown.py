"""What the pages share: the notice at their head, tables and code."""

from __future__ import annotations

from collections.abc import Iterable

NOTICE = "<!-- made by `python -m scripts.pages --write`; do not edit -->"


def table(*columns: str, rows: Iterable[Iterable[str]]) -> str:
    """Returns a table of Markdown, without a line break at its end."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (columns, ["---"] * len(columns), *rows))


def code(text: str) -> str:
    """Returns text as code; nothing for nothing."""
    return f"`{text}`" if text else ""
