"""Lines of a batch's input file."""

from __future__ import annotations

from typing import Any, NamedTuple

import orjson

LONGEST_CUSTOM_ID = 512


class BatchLine(NamedTuple):
    """A request of a batch."""

    custom_id: str
    body: dict[str, Any]


class LineError(NamedTuple):
    """Why a line is not a request."""

    custom_id: str | None
    code: str
    message: str

    def as_result(self, number: int) -> bytes:
        """Returns the line's line of the error file."""
        error = {"code": self.code, "message": f"Line {number + 1}: {self.message}", "line": number + 1}
        return orjson.dumps(
            {"id": f"batch_req_{number}", "custom_id": self.custom_id, "response": None, "error": error}
        )


def read_lines(data: bytes, endpoint: str, longest: int) -> list[BatchLine | LineError]:
    """Returns the lines of an input file that are not empty.

    Args:
        endpoint: path of all requests.
        longest: most bytes of a line.
    """
    seen: set[str] = set()
    return [_read(line, endpoint, longest, seen) for line in data.split(b"\n") if line.strip()]


def _read(line: bytes, endpoint: str, longest: int, seen: set[str]) -> BatchLine | LineError:
    if len(line) > longest:
        return LineError(None, "line_too_large", f"it has {len(line)} bytes; the limit is {longest}.")
    try:
        value = orjson.loads(line)
    except orjson.JSONDecodeError:
        return LineError(None, "invalid_json_line", "it is not valid JSON.")
    if not isinstance(value, dict):
        return LineError(None, "invalid_json_line", "it is not a JSON object.")
    custom_id = value.get("custom_id")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= LONGEST_CUSTOM_ID:
        return LineError(None, "invalid_custom_id", f"custom_id must be 1 to {LONGEST_CUSTOM_ID} characters.")
    if custom_id in seen:
        return LineError(custom_id, "duplicate_custom_id", "its custom_id is that of an earlier line.")
    seen.add(custom_id)
    if value.get("method", "POST") != "POST":
        return LineError(custom_id, "invalid_method", "method must be POST.")
    if value.get("url") != endpoint:
        return LineError(custom_id, "invalid_url", f"url must be {endpoint}, the endpoint of the batch.")
    body = value.get("body")
    if not isinstance(body, dict):
        return LineError(custom_id, "invalid_body", "body must be an object.")
    if body.get("stream") or body.get("background"):
        return LineError(custom_id, "invalid_body", "stream and background must be false in a batch.")
    return BatchLine(custom_id, body)
