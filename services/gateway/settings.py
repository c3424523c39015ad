"""Settings of the gateway."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, ClassVar

from pydantic import AfterValidator, Field, SecretStr

from services.common.observability.audit import AuditSettings
from services.common.security.settings import HttpsSettings
from services.common.settings.service import AddressList, CommaList, ServiceSettings, settings_config
from services.common.types.media.parts import MediaLimits
from services.gateway.admission.settings import AdmissionSettings
from services.gateway.http.body_budgets import BodyBudgets
from services.gateway.pipeline.session_affinity import HEADER, SOURCES
from services.gateway.pipeline.settings import PipelineSettings
from services.gateway.streams.migration_policy import MigrationPolicy


def _session_sources(names: list[str]) -> list[str]:
    for name in names:
        if name not in SOURCES:
            raise ValueError(f"{name!r} is not a session source; choose from {', '.join(SOURCES)}")
    return names


MIN_BODY_MEMORY_MB = 64
"""MiB for all request bodies together while max-body-mb is small; further bodies wait."""
MEMORY_FILES_MB, REDIS_FILES_MB = 96, 1_024
"""Defaults of what is stored of files and batches of all tenants, by where it is stored, MiB."""
MEMORY_FILES_SHARE, REDIS_FILES_SHARE = 2 / 3, 1 / 4
"""Share of it that one tenant may fill."""
MEDIA_SHARE = 3 / 4
"""Share of the largest body that the file of one media item may have: its base64 text takes 4/3 of it."""


class GatewaySettings(PipelineSettings, AdmissionSettings, AuditSettings, HttpsSettings, ServiceSettings):
    """Settings of the gateway. Every flag is also an environment variable: --log-level is SLUICE_GATEWAY_LOG_LEVEL."""

    model_config = settings_config("gateway")

    max_choices: ClassVar[int] = 16
    """Largest n of a request, and most prompts of a completions request."""

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

    max_connections: int = Field(
        16_384, ge=1, description="maximum number of open connections; further ones are closed immediately"
    )
    write_timeout_s: float = Field(
        60, gt=0, description="longest time that a client may read nothing before it is disconnected, seconds"
    )
    comment_every_s: float = Field(
        15,
        ge=0,
        description="interval of comments or events that keep silent event streams open, seconds; 0: never",
    )
    allowed_hosts: CommaList = Field(
        [],
        description="accepted names in Host headers; '*': any; a gateway on loopback always accepts localhost and "
        "loopback addresses and rejects other names, as protection against DNS rebinding; empty: any name, unless the "
        "gateway listens on loopback",
    )
    allowed_origins: CommaList = Field(
        [],
        description="origins of web pages from which browsers may send requests, such as https://chat.example.com, in "
        "addition to the gateway's own; only used where Host headers are checked, and for types of bodies; '*': any",
    )
    reuse_port: bool = Field(
        False, description="allow other gateway processes to listen on the same port (SO_REUSEPORT)"
    )

    max_body_mb: float = Field(
        10,
        gt=0,
        le=1024,
        description="maximum size of a request body, MiB; all bodies together, including parsed ones, may "
        "take four times as much, and at least 64 MiB; further ones wait unread, for at most body-timeout-s",
    )
    max_unsent_kb: int = Field(
        1024, ge=16, description="maximum unsent text buffered for a slow client before it is disconnected, KiB"
    )

    body_timeout_s: float = Field(30, gt=0, description="timeout for receiving a request body")
    tokenize_timeout_s: float = Field(15, gt=0, description="timeout of calls to preprocess")
    route_timeout_s: float = Field(
        5, gt=0, description="timeout of calls to the router; longer than the routers' wait-ms"
    )
    wait_for_workers_ms: int = Field(
        0,
        ge=0,
        le=600_000,
        description="longest wait in the router's queue while a model has no worker, milliseconds; for models that "
        "scale from zero",
    )
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
    responses_kept_mb: int = Field(
        64,
        ge=0,
        description="maximum size of all stored responses of /v1/responses together, 64 responses for each MiB; one "
        "tenant may fill a quarter of it once there are API keys; 0: none are stored",
    )
    responses_kept_s: float = Field(86_400, gt=0, description="how long a response is stored")
    responses_redis_url: SecretStr = Field(
        SecretStr(""),
        description="Redis in which gateways share stored responses, files, batches, loaded adapters and sleeping "
        "workers, in the format of the router's redis-url; the limits apply to what all gateways store there; empty: "
        "each gateway stores its own",
    )

    batch_concurrency: int = Field(
        8,
        ge=0,
        le=1_024,
        description="maximum number of requests of batches that this gateway runs at once; a tenant of which none runs "
        "may run one more; 0: none",
    )
    files_kept_mb: int = Field(
        0,
        ge=0,
        description="maximum size of the files, batches and results of all tenants together, MiB; they are in the "
        "gateway's memory without responses-redis-url, where one tenant may fill two thirds, and in that of Redis with "
        f"it, where one may fill a quarter; 0: {MEMORY_FILES_MB} in the gateway's memory, {REDIS_FILES_MB:,} in Redis",
    )
    files_kept_s: float = Field(7 * 86_400, gt=0, description="how long files, batches and their results are stored")

    @property
    def body_memory_bytes(self) -> int:
        """Memory limit for all request bodies together, bytes."""
        return int(max(MIN_BODY_MEMORY_MB, 4 * self.max_body_mb) * (1 << 20))

    @property
    def files_kept_bytes(self) -> tuple[int, int]:
        """Limits for the files, batches and results of one tenant, and of all tenants, bytes."""
        in_redis = self.responses_redis_url.get_secret_value()
        usual_mb, share = (REDIS_FILES_MB, REDIS_FILES_SHARE) if in_redis else (MEMORY_FILES_MB, MEMORY_FILES_SHARE)
        of_all = (self.files_kept_mb or usual_mb) << 20
        return int(of_all * share), of_all

    @cached_property
    def budgets(self) -> BodyBudgets:
        """The budgets for the contents of a body."""
        return BodyBudgets(media=MediaLimits(item_bytes=int(MEDIA_SHARE * self.max_body_mb * (1 << 20))))

    @property
    def migration_policy(self) -> MigrationPolicy:
        """The limits of migration."""
        return MigrationPolicy(self.pipeline.migration)

    ui: bool = Field(True, description="serve the live view at /ui")
