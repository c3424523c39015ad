"""Settings of the gateway."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Annotated, Self

from pydantic import AfterValidator, Field, SecretStr, model_validator
from pydantic_core import PydanticCustomError

from services.common.observability.audit import AuditSettings
from services.common.security.settings import HttpsSettings, RouterTokenSettings
from services.common.settings import AddressList, CommaList, ServiceSettings, settings_config
from services.gateway.http.body_budgets import BodySettings
from services.gateway.http.settings import HttpSettings
from services.gateway.pipeline.config import (
    ALIASES,
    Disaggregation,
    PipelineConfig,
    PresetName,
    Routing,
    StageLocation,
    parse_stages,
    resolve,
)
from services.gateway.pipeline.session_affinity import HEADER, SOURCES
from services.gateway.streams.migration_policy import MigrationPolicy


def _session_sources(names: list[str]) -> list[str]:
    for name in names:
        if name not in SOURCES:
            raise ValueError(f"{name!r} cannot name a session; choose from {', '.join(SOURCES)}")
    return names


BODY_MEMORY_MB = 64


class GatewaySettings(HttpSettings, BodySettings, AuditSettings, HttpsSettings, RouterTokenSettings, ServiceSettings):
    """Settings of the gateway. Every flag is also an environment variable: --log-level is SLUICE_GATEWAY_LOG_LEVEL."""

    model_config = settings_config("gateway")

    listen: str = Field("127.0.0.1:8000", description="host:port of the HTTP server; port 0 picks a free one")
    preprocess: AddressList = Field(
        ["127.0.0.1:50051"], description="host:port of preprocess; names mean all addresses"
    )
    router: AddressList = Field(["127.0.0.1:50052"], description="host:port of router; names mean all addresses")
    postprocess: AddressList = Field(
        ["127.0.0.1:50053"], description="host:port of postprocess; names mean all addresses"
    )

    max_body_mb: float = Field(10, gt=0, le=1024, description="largest request body, MiB")
    max_body_memory_mb: float = Field(
        0,
        ge=0,
        description="memory of all request bodies together, parsed ones included, MiB; bodies that do not fit wait "
        "unread, for body-timeout-s at most; 0 (default): 64, or 4 times max-body-mb where that is more",
    )
    large_body_share: float = Field(
        0.25,
        gt=0,
        le=1,
        description="most of the gateway's time that parsing request bodies over 64 KiB takes; where more arrive they "
        "wait, for body-timeout-s at most, and other requests go on",
    )
    worker_message_mb: int = Field(
        16,
        ge=1,
        le=64,
        description="largest message that the workers take, their --max-message-mb, MiB; a request that would be "
        "larger is refused with 413",
    )
    max_batch_tokens: int = Field(
        1 << 18,
        ge=1024,
        le=1 << 20,
        description="tokens that a worker may send in one message; one that sends more loses its session, and its "
        "generations fail",
    )
    max_choices: int = Field(16, ge=1, le=128, description="largest n, and most prompts of one completions request")
    max_streams: int = Field(4096, ge=1, description="generations under way at once; more are refused with 429")
    max_unsent_kb: int = Field(1024, ge=16, description="text held for one slow client before it is cut, KiB")

    body_timeout_s: float = Field(30, gt=0, description="longest wait for a request body")
    tokenize_timeout_s: float = Field(15, gt=0, description="longest wait for preprocess")
    route_timeout_s: float = Field(5, gt=0, description="longest wait for the router")
    connect_timeout_s: float = Field(3, gt=0, description="longest wait for a connection to a worker")
    embed_timeout_s: float = Field(60, gt=0, description="longest wait for the vectors of an embeddings request")
    stall_timeout_s: float = Field(120, gt=0, description="longest silence of a generation before it is given up")
    token_timeout_s: float = Field(
        60,
        ge=0,
        description="a worker that has requests and says nothing for this long counts as lost: they move to another "
        "one; must be longer than the longest prompt takes alone; 0: any silence is allowed",
    )
    keep_alive_s: int = Field(75, ge=1, description="idle HTTP connections are closed after this long")

    session_sources: Annotated[CommaList, AfterValidator(_session_sources)] = Field(
        [HEADER],
        description="where the name of a request's session comes from, the first that is sent: x-session-id (header), "
        "prompt_cache_key, user (fields); the router keeps a session on one worker; empty: no sessions",
    )

    request_timeout_s: float = Field(
        0,
        ge=0,
        description="longest that a request may take; clients ask for less with x-request-timeout-ms; 0: no limit",
    )
    postprocess_wait_s: float = Field(
        10, ge=0, description="longest that streams wait for a postprocess replica when there is none"
    )
    preset: PresetName | None = Field(
        None,
        description="of the pipeline's knobs below; full_discovery if neither this nor the file says one; "
        "direct_execution: routing direct without migration; query_only: routing query-only",
    )
    pipeline_config: Path | None = Field(
        None, description="TOML, YAML or JSON file with the pipeline's knobs; flags change what it says"
    )
    preprocessing: StageLocation | None = Field(
        None, description="who makes token ids: preprocess services (frontend, default) or the worker's engine"
    )
    postprocessing: StageLocation | None = Field(
        None, description="who makes text: postprocess services (frontend, default) or the worker's engine"
    )
    routing: Routing | None = Field(
        None,
        description="the router chooses the worker (discover, default); the request names it (direct); requests are "
        "answered with who would be chosen (query-only)",
    )
    disaggregation: Disaggregation | None = Field(
        None,
        description="prefill and decode workers share requests when there are both (auto, default), always (require), "
        "never (off)",
    )
    disagg_min_tokens: int | None = Field(
        None, ge=0, description="shorter prompts are not shared where one worker can do all, tokens; 0 (default): none"
    )
    stage: CommaList = Field(
        [], description="NAME=package.module:Class, a stage of your own; tokenize, route, place or postprocess"
    )
    model_grace_s: float = Field(
        300,
        ge=0,
        description="seconds after a model's last worker has left until stages of your own are called with "
        "on_model_removed, and what is kept of the model is dropped",
    )
    handler: str = Field("", description="package.module:Class, a pipeline of your own")
    migration: bool | None = Field(None, description="generations whose worker is lost go on elsewhere (default)")
    migration_enabled: bool | None = Field(None, description="another name of migration")
    direct_route: bool = Field(False, description="another name of routing direct; no: as the other knobs say")
    migration_limit: int = Field(3, ge=1, le=100, description="how often one generation may move")
    migration_max_tokens: int = Field(
        131_072, ge=0, description="longest generation that may move, tokens of prompt and answer together; 0: any"
    )
    migration_wait_s: float = Field(10, gt=0, description="longest that a generation waits for a worker that takes it")

    responses_kept: int = Field(
        4096, ge=0, description="responses of /v1/responses kept to be read again and gone on from; 0: none"
    )
    responses_kept_mb: int = Field(64, ge=1, description="bytes of all kept responses together, MiB")
    responses_kept_per_tenant: int = Field(
        1024, ge=0, description="responses that the API keys of one tenant keep at most; 0: none"
    )
    responses_kept_per_tenant_mb: int = Field(
        16, ge=1, description="bytes of the responses that the API keys of one tenant keep at most, MiB"
    )
    responses_kept_s: float = Field(86_400, gt=0, description="how long a response is kept")
    responses_redis_url: SecretStr = Field(
        SecretStr(""),
        description="where gateways share the responses they keep, in the forms of the router's redis-url; only the "
        "bounds per tenant hold there; empty: each gateway keeps its own",
    )

    @property
    def body_memory_bytes(self) -> int:
        """Memory of all request bodies together."""
        return int((self.max_body_memory_mb or max(BODY_MEMORY_MB, 4 * self.max_body_mb)) * (1 << 20))

    @property
    def migration_policy(self) -> MigrationPolicy:
        """How generations move."""
        return MigrationPolicy(
            self.pipeline.migration, self.migration_limit, self.migration_max_tokens, self.migration_wait_s
        )

    @cached_property
    def pipeline(self) -> PipelineConfig:
        """The pipeline's knobs, of preset, file and flags; ValueError as `config.resolve`."""
        names = ("preset", "preprocessing", "postprocessing", "routing", "migration", "disaggregation", *ALIASES)
        flags = {name: getattr(self, name) for name in (*names, "disagg_min_tokens")}
        flags |= {"stages": parse_stages(self.stage), "handler": self.handler or None}
        return resolve(flags, self.pipeline_config)

    @model_validator(mode="after")
    def _pipeline_fits_together(self) -> Self:
        try:
            assert self.pipeline
        except ValueError as error:
            raise PydanticCustomError("pipeline", "{sentence}", {"sentence": str(error)}) from error
        return self

    ui: bool = Field(True, description="serve the live view at /ui")
    ui_viewers: int = Field(16, ge=1, le=1000, description="pages of the live view open at once; more are refused")
