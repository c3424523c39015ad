"""Prints the pages named as arguments, such as `python -m scripts.pages metrics`, or all; `--write` writes them."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path

from scripts.pages import errors, fields, limits, metrics, settings

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES: Mapping[str, Callable[[], str]] = {
    "errors": errors.page,
    "fields": fields.page,
    "limits": limits.page,
    "metrics": metrics.page,
    "settings": settings.page,
}


def main() -> None:
    """Prints or writes the pages."""
    parser = argparse.ArgumentParser(prog="python -m scripts.pages", description=__doc__)
    parser.add_argument("page", nargs="*", choices=[[], *PAGES], default=[])
    parser.add_argument("--write", action="store_true", help="write them into docs")
    options = parser.parse_args()
    for name in options.page or PAGES:
        if options.write:
            (DOCS / f"{name}.md").write_text(PAGES[name](), "utf-8")
        else:
            print(PAGES[name](), end="")


if __name__ == "__main__":
    main()
