"""Reads multipart forms whose size is bounded already."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from services.common.errors import SluiceError, invalid

MOST_PARTS = 32
_BOUNDARY = re.compile(r'\bboundary=(?:"([^"]{1,70})"|([^\s;"]{1,70}))')
_NAME = re.compile(r'\bname="([^"]*)"')
_FILENAME = re.compile(r'\bfilename="([^"]*)"')


class FormPart(NamedTuple):
    """One field; `filename` is empty unless it is a file."""

    filename: str
    content: bytes


def read_form(body: bytes, content_type: str) -> Mapping[str, FormPart]:
    """Returns the fields of a form by name; raises SluiceError(INVALID_ARGUMENT) if it is malformed."""
    found = _BOUNDARY.search(content_type)
    if not content_type.lower().startswith("multipart/form-data") or found is None:
        raise invalid("Send the file as multipart/form-data with a boundary.", param="file")
    delimiter = b"\r\n--" + (found[1] or found[2]).encode()
    first, *rest = (b"\r\n" + body).split(delimiter, MOST_PARTS + 1)
    if first.strip() or not rest or len(rest) > MOST_PARTS or not rest[-1].startswith(b"--"):
        raise _malformed()
    fields = {}
    for part in rest[:-1]:
        head, separator, content = part.partition(b"\r\n\r\n")
        text = head.decode("utf-8", "replace")
        name = _NAME.search(re.sub(r'\bfilename="[^"]*"', "", text))
        if not separator or name is None:
            raise _malformed()
        filename = _FILENAME.search(text)
        fields[name[1]] = FormPart(filename[1] if filename else "", content)
    return fields


def _malformed() -> SluiceError:
    return invalid("The form is malformed; send multipart/form-data as client libraries do.", param="file")
