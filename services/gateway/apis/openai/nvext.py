"""`nvext`, the field in which Dynamo's clients and schedulers say where a request runs."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from services.common.packing import pack_u32
from services.gateway.apis.openai.fields import MAX_TOKEN_IDS, Strict, TokenId
from services.gateway.core.routing_hints import RoutingHints

QUERY = "query_instance_id:"
WorkerName = Annotated[str, Field(min_length=1, max_length=512)] | Annotated[int, Field(ge=0, lt=2**64)]


class Nvext(Strict):
    """Where the request runs, as its scheduler chose; a worker goes by its id or by host:port."""

    backend_instance_id: WorkerName | None = Field(None, description="the worker that runs it")
    decode_worker_id: WorkerName | None = Field(
        None, description="the same; with a prefill worker, the one that answers"
    )
    prefill_worker_id: WorkerName | None = Field(None, description="the worker that computes the prompt")
    token_data: list[TokenId] | None = Field(
        None, min_length=1, max_length=MAX_TOKEN_IDS, fail_fast=True, description="token ids in place of the prompt"
    )
    annotations: list[Literal["query_instance_id:"]] | None = Field(
        None, max_length=8, description="query_instance_id: answers which worker would run it, and runs nothing"
    )

    def hints(self) -> RoutingHints:
        """Returns the same in the gateway's own words."""
        answering = "decode_worker_id" if self.decode_worker_id is not None else "backend_instance_id"
        named = {
            part: field
            for part, field in (("workers", answering), ("prefill", "prefill_worker_id"))
            if getattr(self, field) is not None
        }

        def workers(part: str) -> tuple[str, ...]:
            return (str(getattr(self, named[part])),) if part in named else ()

        return RoutingHints(
            workers=workers("workers"),
            prefill=workers("prefill"),
            token_ids=None if self.token_data is None else pack_u32(self.token_data),
            query_only=bool(self.annotations),
            sources={part: f"nvext.{field}" for part, field in named.items()},
        )
