"""Files of HTML pages of the gateway, and headers that keep pages from loading from or sending to other hosts."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from importlib import resources

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


def page_files(package: str) -> dict[str, File]:
    """Reads all files in the folder `page` of a package, by name."""
    found = {}
    for entry in resources.files(package).joinpath("page").iterdir():
        suffix = entry.name.rpartition(".")[2]
        if suffix in _TYPES:
            body = entry.read_bytes()
            found[entry.name] = File(body, _TYPES[suffix], f'"{sha256(body).hexdigest()[:16]}"')
    return found


def page_headers(scripts: str = "'self'", styles: str = "'self'", images: str = "'self'") -> dict[str, str]:
    """Returns the headers of a page and its files.

    Args:
        scripts: sources of scripts, and of the data that they fetch; empty for none.
        styles: sources of style sheets; empty for none.
        images: sources of images; empty for none.
    """
    sources = (("script", scripts), ("style", styles), ("img", images), ("connect", scripts))
    policy = [
        "default-src 'none'",
        *(f"{kind}-src {source}" for kind, source in sources if source),
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
    return {
        "content-security-policy": "; ".join(policy),
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cross-origin-opener-policy": "same-origin",
        "cross-origin-resource-policy": "same-origin",
        "cache-control": "no-cache",
    }
