"""The fields of requests: `python -m sluice.fields` prints them, with `--write` they go into docs/fields.md.

Source of the rows: the request schemas of the gateway's APIs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from services.gateway.apis.anthropic.schemas import MessagesRequest
from services.gateway.apis.openai.embedding_schemas import EmbeddingRequest, RerankRequest, ScoreRequest
from services.gateway.apis.openai.schemas import ChatCompletionRequest, CompletionRequest
from services.gateway.apis.openai.unsupported_fields import PLATFORM_FIELDS, neutral_values
from services.gateway.apis.responses.schemas import ResponsesRequest

PAGE = Path(__file__).resolve().parents[1] / "docs" / "fields.md"
SCHEMAS: dict[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatCompletionRequest,
    "/v1/completions": CompletionRequest,
    "/v1/embeddings": EmbeddingRequest,
    "/v1/score": ScoreRequest,
    "/v1/rerank": RerankRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": MessagesRequest,
}
CHECKED_WITH = (
    "openai-python 3.51.0, anthropic-sdk-python 2.11.0, Codex CLI 0.169.0, Claude Code 2.1.330 and OpenCode 1.18.33"
)
HEAD = f"""# Fields of requests

<!-- made by `python -m sluice.fields --write`; do not edit -->

Every field that a request may have, by endpoint, checked with {CHECKED_WITH}. A field that is in none of these lists is
rejected by name.

- **Honoured**: it has the effect that its API documents.
- **Without effect**: accepted, because its absence cannot make an answer wrong. Where a client may expect an effect,
  the answer says so: `x-sluice-degraded: no_effect:FIELD`, and `degraded` in the body. Fields of the platform that the
  API comes from, such as `metadata`, are not reported.
- **Refused**: rejected with a reason, because the answer would silently differ. `null` and the neutral values in
  parentheses are accepted.

Tools that only the API's own platform can run, and items or blocks that only it can read, are left out of the prompt
and reported as `left_out:TYPE`.
"""


def page() -> str:
    """Returns the page."""
    return "\n".join([HEAD, *(line for path, schema in SCHEMAS.items() for line in _section(path, schema))]) + "\n"


def _section(path: str, schema: type[BaseModel]) -> Iterator[str]:
    fields = sorted((field.alias or name, field) for name, field in schema.model_fields.items())
    groups: dict[str, list[str]] = {"honoured": [], "platform": [], "no effect": [], "refused": []}
    for name, field in fields:
        kind, text = _class_of(name, field)
        groups[kind].append(text)
    yield f"## {path}\n"
    yield f"**Honoured:** {', '.join(groups['honoured'])}.\n"
    if groups["platform"]:
        yield f"**Without effect, not reported:** {', '.join(groups['platform'])}.\n"
    for kind, title in (("no effect", "Without effect, reported"), ("refused", "Refused")):
        if groups[kind]:
            yield f"| {title} | why |\n| --- | --- |"
            yield "\n".join(groups[kind]) + "\n"


def _class_of(name: str, field: FieldInfo) -> tuple[str, str]:
    refused, neutral = neutral_values(field)
    if neutral is None:
        return ("platform" if name in PLATFORM_FIELDS else "honoured"), f"`{name}`"
    shown = ", ".join(f"`{value}`" for value in neutral if value is not None)
    reason = str(field.description).partition(": ")[2].removesuffix(".")
    return ("refused" if refused else "no effect"), f"| `{name}`{f' ({shown})' if shown else ''} | {reason} |"


def main(arguments: Sequence[str]) -> None:
    """Prints the page, or writes it."""
    if "--write" in arguments:
        PAGE.write_text(page(), "utf-8")
    else:
        print(page(), end="")


if __name__ == "__main__":
    main(sys.argv[1:])
