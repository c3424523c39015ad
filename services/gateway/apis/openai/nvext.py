"""`nvext`: the field with which Dynamo's clients and schedulers select workers."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from services.common.base.packing import pack_u32
from services.gateway.apis.openai.fields import MAX_TOKEN_IDS, Strict, TokenId
from services.gateway.core.routing_hints import RoutingHints

WorkerName = Annotated[str, Field(min_length=1, max_length=512)] | Annotated[int, Field(ge=0, lt=2**64)]


class Nvext(Strict):
    """The workers of a request, by id or as host:port."""

    backend_instance_id: WorkerName | None = Field(None, description="the worker that runs the request")
    decode_worker_id: WorkerName | None = Field(
        None, description="the worker that generates the output, if there is a prefill worker"
    )
    prefill_worker_id: WorkerName | None = Field(None, description="the worker that computes the prompt")
    token_data: list[TokenId] | None = Field(
        None, min_length=1, max_length=MAX_TOKEN_IDS, fail_fast=True, description="token ids in place of the prompt"
    )
    annotations: list[Literal["query_instance_id:"]] | None = Field(
        None,
        max_length=8,
        description="query_instance_id: returns the worker that would be chosen, without running the request",
    )

    def hints(self) -> RoutingHints:
        """Returns the gateway's routing hints of these fields."""
        decode_field = "decode_worker_id" if self.decode_worker_id is not None else "backend_instance_id"
        named = {
            role: field
            for role, field in (("workers", decode_field), ("prefill", "prefill_worker_id"))
            if getattr(self, field) is not None
        }

        def workers(role: str) -> tuple[str, ...]:
            return (str(getattr(self, named[role])),) if role in named else ()

        return RoutingHints(
            workers=workers("workers"),
            prefill=workers("prefill"),
            token_ids=None if self.token_data is None else pack_u32(self.token_data),
            query_only=bool(self.annotations),
            sources={role: f"nvext.{field}" for role, field in named.items()},
        )
