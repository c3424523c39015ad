"""docs/fields.md, the fields of requests.

Source of the rows: the request schemas of the gateway's APIs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from scripts.pages.markdown import NOTICE, code, table
from services.gateway.apis.anthropic.schemas import MessagesRequest
from services.gateway.apis.generate.schemas import GenerateTokensRequest
from services.gateway.apis.openai.embedding_schemas import EmbeddingRequest
from services.gateway.apis.openai.schemas import ChatCompletionRequest, CompletionRequest
from services.gateway.apis.openai.unsupported_fields import FieldClass, class_of, neutral_values
from services.gateway.apis.responses.schemas import ResponsesRequest
from services.gateway.apis.scores.schemas import ClassifyRequest, RerankRequest, ScoreRequest

SCHEMAS: dict[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatCompletionRequest,
    "/v1/completions": CompletionRequest,
    "/v1/embeddings": EmbeddingRequest,
    "/v1/score": ScoreRequest,
    "/v1/rerank": RerankRequest,
    "/v1/classify": ClassifyRequest,
    "/inference/v1/generate": GenerateTokensRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": MessagesRequest,
}
SDKS = {"openai": ("3.51.0", "3.54.0"), "anthropic": ("2.11.0", "2.12.0")}
"""Client libraries all of whose request fields have a class here, by distribution."""
AGENTS = {"Codex CLI": "0.169.0", "Claude Code": "2.1.330", "OpenCode": "1.18.33"}
"""Agents whose requests are accepted."""
_LISTS = {
    FieldClass.HONOURED: "Honoured",
    FieldClass.HINT: "Honoured where the model can, otherwise without effect and reported",
    FieldClass.PLATFORM: "Without effect, not reported",
}
_TABLES = {FieldClass.NO_EFFECT: "Without effect, reported", FieldClass.REFUSED: "Refused"}


def page() -> str:
    """Returns the page."""
    return "\n".join([_head(), *(line for path, schema in SCHEMAS.items() for line in _section(path, schema))]) + "\n"


def rows(schema: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yields the fields of a schema with their paths; of objects in it only the fields that are not honoured."""
    for name, field in schema.model_fields.items():
        path = prefix + (field.alias or name)
        if not prefix or class_of(field) is not FieldClass.HONOURED:
            yield path, field
        for nested in _models(field.annotation):
            yield from rows(nested, f"{path}.")


def _head() -> str:
    sdks = ", ".join(f"`{name}` {' and '.join(versions)}" for name, versions in SDKS.items())
    agents = ", ".join(f"{name} {version}" for name, version in AGENTS.items())
    return f"""# Fields of requests

{NOTICE}

Every field that a request may have, by endpoint. A field that is in none of these lists is rejected by name. All fields
of the client libraries {sdks} are here.
Requests of {agents} are accepted.

- **Honoured**: it has the effect that its API documents.
- **Without effect**: accepted, because its absence cannot make an answer wrong. Where a client may expect an effect,
  the answer reports it: `x-sluice-degraded: no_effect:FIELD`, and `degraded` in the body. Fields for the platform that
  the API comes from, such as `service_tier`, are not reported.
- **Refused**: rejected with a reason, because the answer would silently differ. `null` and the neutral values in
  parentheses are accepted.

Tools that only the API's own platform can run, and items or blocks that only it can read, are left out of the prompt
and reported as `left_out:TYPE`.
"""


def _section(path: str, schema: type[BaseModel]) -> Iterator[str]:
    groups: dict[FieldClass, list[tuple[str, FieldInfo]]] = {each: [] for each in FieldClass}
    for name, field in sorted(rows(schema), key=lambda row: row[0]):
        groups[class_of(field)].append((name, field))
    yield f"## {path}\n"
    for kind, title in _LISTS.items():
        if groups[kind]:
            yield f"**{title}:** {', '.join(f'`{name}`' for name, _ in groups[kind])}.\n"
    for kind, title in _TABLES.items():
        if groups[kind]:
            yield table(title, "why", rows=(_row(name, field) for name, field in groups[kind])) + "\n"


def _row(name: str, field: FieldInfo) -> tuple[str, str]:
    _, neutral = neutral_values(field)
    shown = ", ".join(f"`{value}`" for value in neutral or () if value is not None)
    reason = str(field.description).partition(": ")[2].removesuffix(".")
    return code(name) + (f" ({shown})" if shown else ""), reason


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models(argument)
