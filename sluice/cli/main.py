"""Where `sluice` begins. The commands are in `commands`, whose imports take a second."""

from __future__ import annotations

import sys
from typing import NoReturn

INTERRUPTED = 130


def main() -> NoReturn:
    """Entry point; Ctrl-C is an exit code from the first moment on, not a traceback."""
    try:
        from sluice.cli.commands import invoke

        code = invoke(sys.argv[1:] or ["--help"])
    except KeyboardInterrupt:
        code = INTERRUPTED
    sys.exit(code)


if __name__ == "__main__":
    main()
