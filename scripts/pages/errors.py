"""docs/errors.md, the catalogue of errors.

Source of the rows: every call in `services` that makes a `SluiceError`. A message appears as its template, with `…` for
what differs from case to case.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from scripts.pages.markdown import NOTICE, code, table
from services.common.base.errors import ErrorKind, SluiceError

SERVICES = Path(__file__).resolve().parents[2] / "services"
AREAS = ("gateway", "preprocess", "router", "worker", "postprocess", "common")
KINDS = {
    "invalid": ErrorKind.INVALID_ARGUMENT,
    "not_found": ErrorKind.NOT_FOUND,
    "unavailable": ErrorKind.UNAVAILABLE,
    "overloaded": ErrorKind.OVERLOADED,
    "internal": ErrorKind.INTERNAL,
}
ACTIONS = {
    "INVALID_ARGUMENT": "Correct the request; the field in `param` names what is wrong.",
    "NOT_FOUND": "Check the name; `GET /v1/models` lists the models.",
    "TOO_LARGE": "Send a smaller request, or raise the limit that the message names.",
    "OVERLOADED": "Retry after the `Retry-After` seconds. 429 instead of 503: a limit of the API key is exceeded.",
    "UNAVAILABLE": "Retry after the `Retry-After` seconds; if it persists, run `sluice doctor`.",
    "FAILED_PRECONDITION": "Change the configuration that the message names.",
    "DEADLINE_EXCEEDED": "Retry; if it persists, raise the timeout that the message names.",
    "CANCELLED": "None: the client closed the request.",
    "INTERNAL": "Report it with the request id; the log has the details.",
    "INTERNAL_UNKNOWN": "Report it with the request id; the log has the details.",
    "UNAUTHENTICATED": "Send valid credentials.",
    "PERMISSION_DENIED": "Use a key or an identity that is allowed to do this.",
    "CANNOT_CONNECT": "Retry; if it persists, check that the peer runs and its address is right.",
    "CONNECTION_TIMEOUT": "Retry; if it persists, check the network to the peer.",
    "DISCONNECTED": "Retry; the gateway does so itself while no text has been sent.",
    "ENGINE_SHUTDOWN": "Retry; another worker takes the request.",
    "STREAM_INCOMPLETE": "Retry; the gateway does so itself while no text has been sent.",
    "RESPONSE_TIMEOUT": "Retry; if it persists, look at the peer's load and log.",
}
"""What to do, by kind of error; a message that is more precise says so itself."""

HEAD = (
    f"""# Errors

{NOTICE}

Every error that a client or an operator can get, by the service that raises it. `…` stands for what differs from case
to case. Over HTTP an error is `{{"error": {{"message", "type", "param", "code"}}}}`; over gRPC it is a status with
`sluice.v1.ErrorInfo` in its details. The status is that of HTTP; errors of services behind the gateway reach its
clients with the status shown, unless the gateway recovers from them by a retry or a migration.
"""
    ""
)


class ErrorRow(NamedTuple):
    """One message of one place in the code."""

    status: int
    kind: str
    code: str
    message: str


def collect(area: str) -> list[ErrorRow]:
    """Returns the errors of one package of `services`, without duplicates, by status, code and message."""
    rows = set()
    for path in sorted((SERVICES / area).rglob("*.py")):
        rows |= set(_of_module(ast.parse(path.read_text("utf-8"))))
    return sorted(rows)


def page() -> str:
    """Returns the whole page as Markdown."""
    kinds = sorted((SluiceError(kind, "").http_status, kind.name) for kind in ErrorKind)
    actions = ((str(status), code(name), ACTIONS[name]) for status, name in kinds)
    parts = [HEAD, table("status", "kind", "what to do", rows=actions)]
    for area in AREAS:
        rows = ((str(row.status), code(row.kind), code(row.code), row.message) for row in collect(area))
        parts += [f"\n## {area.capitalize()}\n", table("status", "kind", "code", "message", rows=rows)]
    return "\n".join(parts) + "\n"


def _of_module(tree: ast.Module) -> Iterator[ErrorRow]:
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        assigned = {
            node.targets[0].id: node.value
            for node in ast.walk(function)
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        }
        for node in ast.walk(function):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                row = _row(node, node.func.id, assigned)
                if row is not None:
                    yield row


def _row(call: ast.Call, name: str, assigned: dict[str, ast.expr]) -> ErrorRow | None:
    arguments = list(call.args)
    if name in KINDS:
        kind = KINDS[name]
    elif name in {"SluiceError", "Refused"} and arguments and isinstance(arguments[0], ast.Attribute):
        found = ErrorKind.__members__.get(arguments.pop(0).attr)  # type: ignore[attr-defined]
        if found is None:
            return None
        kind = found
    elif name == "OverLimit":
        kind = ErrorKind.OVERLOADED
    else:
        return None
    keywords = {keyword.arg: keyword.value for keyword in call.keywords}
    message = arguments[0] if arguments else keywords.get("message")
    if isinstance(message, ast.Name):
        message = assigned.get(message.id)
    text = _template(message)
    if not text.strip(" …."):
        return None  # a message that another service wrote
    given = keywords.get("code")
    if isinstance(given, ast.Name):
        given = assigned.get(given.id)
    label = str(given.value) if isinstance(given, ast.Constant) else "overloaded" if name == "overloaded" else ""
    return ErrorRow(SluiceError(kind, "", code=label).http_status, kind.name, label, text)


def _template(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value.replace("|", "\\|").replace("\n", " ")
    if isinstance(node, ast.JoinedStr):
        return "".join(_template(part) if isinstance(part, ast.Constant) else "…" for part in node.values)
    if isinstance(node, ast.BinOp):
        return _template(node.left) + _template(node.right)
    return "…" if node is not None else ""
