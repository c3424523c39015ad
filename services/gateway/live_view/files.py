"""Files of the page, and headers that keep it from loading from or sending to other hosts."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from importlib import resources

POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}
_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}


@dataclass(frozen=True, slots=True)
class File:
    """A file of the page."""

    body: bytes
    media_type: str
    etag: str


def page_files() -> dict[str, File]:
    """Reads all files of the page, by name."""
    found = {}
    for entry in resources.files("services.gateway.live_view").joinpath("page").iterdir():
        suffix = entry.name.rpartition(".")[2]
        if suffix in _TYPES:
            body = entry.read_bytes()
            found[entry.name] = File(body, _TYPES[suffix], f'"{sha256(body).hexdigest()[:16]}"')
    return found
