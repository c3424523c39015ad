"""Files of tokens for tests, replaced in one step as secrets are."""

from __future__ import annotations

import os
from pathlib import Path

from services.common.security.bearer_tokens import ShownTokens, digest_of


def replace(path: Path, text: str) -> None:
    """Writes another file under the same name."""
    fresh = path.with_suffix(".fresh")
    fresh.write_text(text, "utf-8")
    os.replace(fresh, path)


def accept(path: Path, *lines: str) -> Path:
    """Writes a tokens file of lines ``TOKEN CALLER``, with digests; returns its path."""
    pairs = (line.split() for line in lines)
    replace(path, "".join(f"{digest_of(token)} {caller}\n" for token, caller in pairs))
    return path


def shows(token: str, *callees: str) -> ShownTokens:
    """Returns what shows a token to these services, or to every one."""
    return lambda callee: token if not callees or callee in callees else ""
