"""Where `sluice` begins. The commands are in `commands`, whose imports take a second."""

from __future__ import annotations

import sys
from typing import NoReturn

CANNOT_RUN, INTERRUPTED = 2, 130


def main() -> NoReturn:
    """Entry point; Ctrl-C is an exit code from the first moment on, not a traceback."""
    try:
        sys.exit(_run(sys.argv[1:] or ["--help"]))
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def _run(arguments: list[str]) -> int:
    try:
        from sluice.cli.commands import invoke

        return invoke(arguments)
    except ModuleNotFoundError as error:  # one service is installed, as in its image
        print(f"sluice: This command needs the package {error.name}: install sluice-llm[all].", file=sys.stderr)
        return CANNOT_RUN


if __name__ == "__main__":
    main()
