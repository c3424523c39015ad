"""Lua scripts of the Redis store; each is one atomic operation."""

from __future__ import annotations

import hashlib
from importlib.resources import files
from pathlib import Path


class Script:
    """A script prefixed with the common part; Redis caches it by `sha`."""

    def __init__(self, name: str) -> None:
        folder = files(__name__)
        self.name = name
        self.text = "\n".join((folder / f"{part}.lua").read_text("utf-8") for part in ("common", name))
        self.sha = hashlib.sha1(self.text.encode(), usedforsecurity=False).hexdigest()


def all_scripts() -> dict[str, Script]:
    """Returns every script by its name, which is the name of its file."""
    paths = (Path(entry.name) for entry in files(__name__).iterdir())
    return {path.stem: Script(path.stem) for path in paths if path.suffix == ".lua" and path.stem != "common"}
