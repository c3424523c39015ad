"""Entry point of `sluice`. The commands are in `commands`, which takes a second to import."""

from __future__ import annotations

import sys
from typing import NoReturn

CANNOT_RUN, INTERRUPTED = 2, 130


def main() -> NoReturn:
    """Runs the command line; Ctrl-C leads to an exit code instead of a traceback, even during imports."""
    try:
        sys.exit(_run(sys.argv[1:] or ["--help"]))
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def _run(arguments: list[str]) -> int:
    try:
        from sluice.cli.commands import invoke

        return invoke(arguments)
    except ModuleNotFoundError as error:  # only one service is installed, as in its image
        print(f"sluice: This command needs the package {error.name}: install sluice-llm[all].", file=sys.stderr)
        return CANNOT_RUN


if __name__ == "__main__":
    main()
