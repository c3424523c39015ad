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
            raise ValueError(f"{name!r} is not a session source; choose from {', '.join(SOURCES)}")
    return names


MIN_BODY_MEMORY_MB = 64


class GatewaySettings(HttpSettings, BodySettings, AuditSettings, HttpsSettings, RouterTokenSettings, ServiceSettings):
    """Settings of the gateway. Every flag is also an environment variable: --log-level is SLUICE_GATEWAY_LOG_LEVEL."""

    model_config = settings_config("gateway")

    listen: str = Field("127.0.0.1:8000", description="host:port of the HTTP server; port 0 selects a free port")
    preprocess: AddressList = Field(
        ["127.0.0.1:50051"],
        description="host:port of the preprocess replicas; a DNS name stands for all of its addresses",
    )
    router: AddressList = Field(
        ["127.0.0.1:50052"], description="host:port of the router replicas; a DNS name stands for all of its addresses"
    )
    postprocess: AddressList = Field(
        ["127.0.0.1:50053"],
        description="host:port of the postprocess replicas; a DNS name stands for all of its addresses",
    )

    max_body_mb: float = Field(10, gt=0, le=1024, description="maximum size of a request body, MiB")
    max_body_memory_mb: float = Field(
        0,
        ge=0,
        description="memory limit for all request bodies together, including parsed ones, MiB; bodies above the limit "
        "wait unread, for at most body-timeout-s; 0 (default): the larger of 64 and 4 times max-body-mb",
    )
    large_body_share: float = Field(
        0.25,
        gt=0,
        le=1,
        description="maximum share of the gateway's time spent on parsing request bodies over 64 KiB; further ones "
        "wait, for at most body-timeout-s, so that other requests proceed",
    )
    worker_message_mb: int = Field(
        16,
        ge=1,
        le=64,
        description="largest message that the workers accept (their --max-message-mb), MiB; larger requests are "
        "refused with 413",
    )
    max_batch_tokens: int = Field(
        1 << 18,
        ge=1024,
        le=1 << 20,
        description="maximum number of tokens in one message of a worker; a worker that exceeds it is disconnected, "
        "and its generations fail",
    )
    max_choices: int = Field(
        16, ge=1, le=128, description="maximum n of a request, and maximum number of prompts of a completions request"
    )
    max_streams: int = Field(
        4096, ge=1, description="maximum number of concurrent generations; more are rejected with 503"
    )
    max_unsent_kb: int = Field(
        1024, ge=16, description="maximum unsent text buffered for a slow client before it is disconnected, KiB"
    )

    body_timeout_s: float = Field(30, gt=0, description="timeout for receiving a request body")
    tokenize_timeout_s: float = Field(15, gt=0, description="timeout of calls to preprocess")
    route_timeout_s: float = Field(5, gt=0, description="timeout of calls to the router")
    wait_for_workers_ms: int = Field(
        0,
        ge=0,
        le=600_000,
        description="longest wait in the router's queue while a model has no worker, milliseconds; for models that "
        "scale from zero",
    )
    connect_timeout_s: float = Field(3, gt=0, description="timeout for connecting to a worker")
    embed_timeout_s: float = Field(60, gt=0, description="timeout for the vectors of an embeddings request")
    stall_timeout_s: float = Field(120, gt=0, description="a generation without new tokens or text for this long fails")
    token_timeout_s: float = Field(
        60,
        ge=0,
        description="a worker that has requests and sends nothing for this long is treated as lost, and its requests "
        "migrate; must exceed the prefill time of the longest prompt; 0: no limit",
    )
    keep_alive_s: int = Field(75, ge=1, description="idle HTTP connections are closed after this long")

    session_sources: Annotated[CommaList, AfterValidator(_session_sources)] = Field(
        [HEADER],
        description="sources of a request's session name, in order of precedence: x-session-id (header), "
        "prompt_cache_key, user (body fields); the router keeps a session on one worker; empty: no sessions",
    )

    request_timeout_s: float = Field(
        0,
        ge=0,
        description="maximum duration of a request; clients can request less with x-request-timeout-ms; 0: no limit",
    )
    postprocess_wait_s: float = Field(
        10, ge=0, description="how long streams wait for a postprocess replica while none is available"
    )
    preset: PresetName | None = Field(
        None,
        description="preset of the pipeline options below; full_discovery unless set here or in the pipeline "
        "configuration file; direct_execution: routing direct; query_only: routing query-only",
    )
    pipeline_config: Path | None = Field(
        None, description="TOML, YAML or JSON file with the pipeline options; flags take precedence"
    )
    preprocessing: StageLocation | None = Field(
        None, description="where prompts are tokenized: preprocess services (frontend, default) or the worker's engine"
    )
    postprocessing: StageLocation | None = Field(
        None,
        description="where tokens become text: postprocess services (frontend, default) or the worker's engine",
    )
    routing: Routing | None = Field(
        None,
        description="the router chooses the worker (discover, default); the request names the worker (direct); the "
        "response only reports the workers that would be chosen (query-only)",
    )
    disaggregation: Disaggregation | None = Field(
        None,
        description="use pairs of prefill and decode workers: when both are available (auto, default), always "
        "(require), never (off)",
    )
    disagg_min_tokens: int | None = Field(
        None,
        ge=0,
        description="prompts with fewer tokens are not disaggregated where one worker can run them alone; 0 "
        "(default): no minimum",
    )
    stage: CommaList = Field(
        [],
        description="NAME=package.module:Class, a custom pipeline stage; NAME is tokenize, route, place or postprocess",
    )
    model_grace_s: float = Field(
        300,
        ge=0,
        description="how long after the removal of a model's last worker custom stages are notified with "
        "on_model_removed and the model's cached data is dropped",
    )
    handler: str = Field("", description="package.module:Class, a custom pipeline")
    migration: bool | None = Field(
        None, description="continue generations whose worker is lost on another worker (default: on)"
    )
    migration_enabled: bool | None = Field(None, description="alias of migration")
    direct_route: bool = Field(False, description="alias of routing direct; off: as set by the other pipeline options")
    migration_limit: int = Field(3, ge=1, le=100, description="maximum number of migrations of one generation")
    migration_max_tokens: int = Field(
        131_072, ge=0, description="maximum prompt and generated tokens of a generation that migrates; 0: no limit"
    )
    migration_wait_s: float = Field(10, gt=0, description="how long a migrating generation waits for a new worker")

    responses_kept: int = Field(
        4096, ge=0, description="maximum number of stored responses of /v1/responses; 0: none are stored"
    )
    responses_kept_mb: int = Field(64, ge=1, description="maximum size of all stored responses together, MiB")
    responses_kept_per_tenant: int = Field(
        1024, ge=0, description="maximum number of stored responses per tenant; 0: none are stored"
    )
    responses_kept_per_tenant_mb: int = Field(
        16, ge=1, description="maximum size of the stored responses of one tenant, MiB"
    )
    responses_kept_s: float = Field(86_400, gt=0, description="how long a response is stored")
    responses_background: int = Field(
        256, ge=0, description="maximum number of background responses in progress; more are rejected with 503"
    )
    responses_background_mb: int = Field(
        64,
        ge=1,
        description="maximum size of the events of background responses, in progress or ended, which clients can "
        "resume to read; a quarter of it for each response, MiB",
    )
    websocket_kept_mb: int = Field(
        64,
        ge=1,
        description="maximum size of the unstored last responses of all WebSockets, which their next messages may "
        "continue, MiB",
    )
    responses_redis_url: SecretStr = Field(
        SecretStr(""),
        description="Redis in which gateways share stored responses, files, batches, loaded adapters and sleeping "
        "workers, in the format of the router's redis-url; of the limits of responses only those per tenant apply "
        "there; empty: each gateway stores its own",
    )

    batch_concurrency: int = Field(
        8, ge=0, le=1_024, description="maximum number of requests of batches that this gateway runs at once; 0: none"
    )
    batch_lines: int = Field(50_000, ge=1, description="maximum number of requests of a batch")
    batches_kept_per_tenant: int = Field(256, ge=1, description="maximum number of stored batches per tenant")
    files_kept_per_tenant: int = Field(
        256, ge=0, description="maximum number of files that a tenant can upload; 0: no files and no batches"
    )
    files_kept_per_tenant_mb: int = Field(
        256, ge=1, description="maximum size of the files of one tenant together, MiB"
    )
    file_mb: int = Field(64, ge=1, le=512, description="maximum size of an uploaded file, MiB")
    files_kept_s: float = Field(7 * 86_400, gt=0, description="how long files, batches and their results are stored")

    @property
    def body_memory_bytes(self) -> int:
        """Memory limit for all request bodies together, bytes."""
        return int((self.max_body_memory_mb or max(MIN_BODY_MEMORY_MB, 4 * self.max_body_mb)) * (1 << 20))

    @property
    def migration_policy(self) -> MigrationPolicy:
        """The limits of migration."""
        return MigrationPolicy(
            self.pipeline.migration, self.migration_limit, self.migration_max_tokens, self.migration_wait_s
        )

    @cached_property
    def pipeline(self) -> PipelineConfig:
        """The pipeline configuration from preset, file and flags; raises ValueError as `config.resolve`."""
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
    ui_viewers: int = Field(
        16, ge=1, le=1000, description="maximum number of open pages of the live view; more are refused"
    )
