"""Lua scripts of the Redis store; each is one atomic operation."""

from __future__ import annotations

import hashlib
from importlib.resources import files


class Script:
    """A script prefixed with the common part; Redis caches it by `sha`."""

    def __init__(self, name: str) -> None:
        folder = files(__name__)
        self.name = name
        self.text = "\n".join((folder / f"{part}.lua").read_text("utf-8") for part in ("common", name))
        self.sha = hashlib.sha1(self.text.encode(), usedforsecurity=False).hexdigest()


NAMES = (
    "register_model",
    "models",
    "claim",
    "renew_claim",
    "release_claim",
    "register",
    "renew",
    "leave",
    "remove",
    "apply",
    "replace",
    "load",
    "blocks",
    "select",
    "book",
    "mark",
    "progress",
    "renew_owners",
    "free",
    "session",
    "set_session",
    "pulse",
    "sweep",
    "sweep_owners",
    "correct",
)
