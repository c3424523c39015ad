"""Reads multipart forms whose size is bounded already."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from services.common.base.errors import SluiceError, invalid

MAX_PARTS = 32
"""Parts of the form of an upload; a form with more is refused with INVALID_ARGUMENT."""
MAX_HEAD_BYTES = 8 << 10
"""Bytes of the headers of a part; a form with more is refused with INVALID_ARGUMENT."""
_BOUNDARY = re.compile(r'\bboundary=(?:"([^"]{1,70})"|([^\s;"]{1,70}))')
_NAME = re.compile(r'\bname="([^"]*)"')
_FILENAME = re.compile(r'\bfilename="([^"]*)"')


class FormPart(NamedTuple):
    """One field; `filename` is empty unless it is a file."""

    filename: str
    content: bytes


def read_form(body: bytes, content_type: str) -> Mapping[str, FormPart]:
    """Returns the fields of a form by name; raises SluiceError(INVALID_ARGUMENT) if it is malformed.

    Nothing but the contents of the fields is copied.
    """
    found = _BOUNDARY.search(content_type)
    if not content_type.lower().startswith("multipart/form-data") or found is None:
        raise invalid("Send the file as multipart/form-data with a boundary.", param="file")
    opener = b"--" + (found[1] or found[2]).encode("utf-8", "replace")
    delimiter = b"\r\n" + opener
    end = 0 if body.startswith(opener) else body.find(delimiter)
    if end < 0 or body[:end].strip():
        raise _malformed()
    start = len(opener) if body.startswith(opener) else end + len(delimiter)
    fields: dict[str, FormPart] = {}
    parts = 0
    while (end := body.find(delimiter, start)) >= 0:
        parts += 1
        if parts >= MAX_PARTS:
            raise _malformed()
        name, part = _part(body, start, end)
        fields[name] = part
        start = end + len(delimiter)
    if not body.startswith(b"--", start):
        raise _malformed()
    return fields


def _part(body: bytes, start: int, end: int) -> tuple[str, FormPart]:
    head_end = body.find(b"\r\n\r\n", start, min(end, start + MAX_HEAD_BYTES))
    text = body[start : max(head_end, start)].decode("utf-8", "replace")
    name = _NAME.search(re.sub(r'\bfilename="[^"]*"', "", text))
    if head_end < 0 or name is None:
        raise _malformed()
    filename = _FILENAME.search(text)
    return name[1], FormPart(filename[1] if filename else "", body[head_end + 4 : end])


def _malformed() -> SluiceError:
    return invalid("The form is malformed; send multipart/form-data as client libraries do.", param="file")
