"""The page at `/docs`: the endpoints of the OpenAPI document, as HTML without scripts or anything of other hosts."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator, Mapping
from hashlib import sha256
from html import escape
from typing import Any

from services.gateway.http.pages import page_headers

MAX_UNION = 6
"""Types of a field that the page of the API names; further ones are shown as `…`."""

_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem;color-scheme:light dark}
summary{cursor:pointer;padding:.3rem 0}code{font-size:.95em}table{border-collapse:collapse;width:100%}
td,th{text-align:left;vertical-align:top;padding:.25rem .75rem .25rem 0;border-bottom:1px solid #8884}
""".strip()
HEADERS = {
    **page_headers(styles=f"'sha256-{b64encode(sha256(_STYLE.encode()).digest()).decode()}'", scripts="", images=""),
    "content-type": "text/html; charset=utf-8",
}
_METHODS = ("get", "post", "put", "patch", "delete")


def api_page(document: Mapping[str, Any]) -> bytes:
    """Returns the page of an OpenAPI document."""
    title = escape(f"{document['info']['title']} {document['info']['version']}")
    sections: dict[str, list[str]] = {}
    for path, operations in document["paths"].items():
        for method in _METHODS:
            if operation := operations.get(method):
                tag = (operation.get("tags") or ["Other"])[0]
                sections.setdefault(tag, []).append(_endpoint(method, path, operation, document))
    body = "".join(f"<h2>{escape(tag)}</h2>{''.join(endpoints)}" for tag, endpoints in sections.items())
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style></head>"
        f"<body><h1>{title}</h1><p>{escape(document['info'].get('description', ''))} The machine-readable form of this "
        f'page is <a href="openapi.json">openapi.json</a>.</p>{body}</body></html>'
    ).encode()


def _endpoint(method: str, path: str, operation: Mapping[str, Any], document: Mapping[str, Any]) -> str:
    summary = escape(operation.get("summary", ""))
    text = operation.get("description") or operation.get("summary", "")
    rows = [
        _row(each["name"], each.get("schema", {}), each.get("required", False), each.get("description", ""))
        for each in operation.get("parameters", ())
    ]
    content = operation.get("requestBody", {}).get("content", {})
    for media in content.values():
        rows += _fields(media.get("schema", {}), document)
    table = f"<table><tr><th>field<th>type<th>meaning{''.join(rows)}</table>" if rows else ""
    responses = ", ".join(
        f"{escape(status)} {escape(found.get('description', ''))}"
        for status, found in operation.get("responses", {}).items()
    )
    return (
        f"<details><summary><code>{method.upper()} {escape(path)}</code> {summary}</summary>"
        f"<p>{escape(text)}</p>{table}<p>Responses: {responses}</p></details>"
    )


def _fields(schema: Mapping[str, Any], document: Mapping[str, Any]) -> Iterator[str]:
    schema = _resolved(schema, document)
    required = schema.get("required", ())
    for name, field in schema.get("properties", {}).items():
        yield _row(name, field, name in required, field.get("description", ""))


def _resolved(schema: Mapping[str, Any], document: Mapping[str, Any]) -> Mapping[str, Any]:
    name = str(schema.get("$ref", "")).rpartition("/")[2]
    found: Mapping[str, Any] = document.get("components", {}).get("schemas", {}).get(name, schema)
    return found


def _row(name: str, schema: Mapping[str, Any], required: bool, meaning: str) -> str:
    kind = escape(_type_of(schema)) + (", required" if required else "")
    return f"<tr><td><code>{escape(name)}</code><td>{kind}<td>{escape(meaning)}"


def _type_of(schema: Mapping[str, Any]) -> str:
    for union in ("anyOf", "oneOf"):
        if union in schema:
            kinds = list(dict.fromkeys(_type_of(each) for each in schema[union]))
            return " or ".join(kinds[:MAX_UNION]) + (" or …" if len(kinds) > MAX_UNION else "")
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if schema.get("type") == "array":
        return f"list of {_type_of(schema.get('items', {}))}"
    if "enum" in schema:
        return " or ".join(f'"{value}"' for value in schema["enum"][:MAX_UNION])
    return str(schema.get("type", "any"))
