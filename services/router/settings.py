"""Settings of the router."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field, SecretStr

from services.common.redis.target import RedisLoginSettings
from services.common.settings.service import Address, AddressList, CommaList, GrpcServiceSettings, settings_config
from services.router.state.reservations.cost import PREFILL_LOAD_SCALE

PolicyName = Literal["kv", "round_robin", "random", "least_loaded", "power_of_two"]


class RouterSettings(RedisLoginSettings, GrpcServiceSettings):
    """Chooses workers for prompts; maintains the worker registry, the block index and reservations.

    Every flag can also be set by environment variable: --log-level by SLUICE_ROUTER_LOG_LEVEL.
    """

    model_config = settings_config("router")

    max_message_mb: ClassVar[int] = 6  # prompts as token ids

    listen: str = Field("127.0.0.1:50052", description="host:port of the gRPC server")
    redis_url: SecretStr = Field(
        SecretStr(""),
        description="redis://host:port/db shared by all replicas, redis+sentinel://host:port,host:port/service/db or "
        "redis+cluster://host:port,host:port; rediss for TLS; empty: state in the memory of this process",
    )
    redis_prefix: str = Field("sluice", min_length=1, pattern=r"^[^{}]+$", description="prefix of all Redis keys")
    redis_timeout_s: float = Field(
        1.0, gt=0, description="timeout of Redis commands in seconds; after it Redis counts as unavailable"
    )
    policy: PolicyName = Field("kv", description="routing policy of requests that do not specify one")
    policies: Path | None = Field(
        None, description="YAML file of composed policies, and of the policy of each model; unset: none"
    )
    prefill_load_scale: float = Field(
        PREFILL_LOAD_SCALE, ge=0, description="weight of prefill load relative to decode load"
    )
    temperature: float = Field(
        0.0, ge=0, description="0: choose the cheapest worker; above: sample from a softmax over the costs"
    )
    busy_kv_share: float = Field(
        0.0, ge=0, le=1, description="a worker with this share of its KV blocks reserved or in use is busy; 0: never"
    )
    busy_prefill_tokens: int = Field(
        0, ge=0, description="a worker with this many prompt tokens reserved and not computed yet is busy; 0: never"
    )
    busy_requests: int = Field(0, ge=0, description="a worker with this many reserved requests is busy; 0: never")
    wait_ms: int = Field(
        0, ge=0, description="longest wait in milliseconds while all workers are busy, for requests that set none"
    )
    wait_for_workers_ms: int = Field(
        0,
        ge=0,
        description="longest wait in milliseconds while a model has no worker, for requests that set none; for models "
        "that scale from zero",
    )
    models: CommaList = Field(
        [], description="models that are known even if none of their workers registered within an hour"
    )
    wait_for_prefill: bool = Field(
        False, description="requests wait for the first prefill worker while decode workers have none"
    )
    enforce_disagg: bool = Field(False, description="fail instead of running prefill and decode on one worker")
    bypass_uncached_tokens: int = Field(
        0, ge=0, description="prompts with at most this many uncached tokens bypass prefill workers; 0: none"
    )
    preprocess: AddressList = Field(
        [], description="host:port of preprocess; names resolve to all addresses; empty: reject OpenAI bodies"
    )
    http_listen: Address = Field("", description="host:port of the HTTP/JSON API; empty: off")
    http_allowed_hosts: CommaList = Field(
        [],
        description="names accepted in Host headers by the HTTP API; '*': any; on loopback it always accepts localhost "
        "and loopback addresses and rejects other names; empty: any name, unless it listens on loopback",
    )
    picker_listen: Address = Field(
        "", description="host:port of the endpoint picker for Envoy (ext_proc), such as 0.0.0.0:9002; empty: none"
    )
    picker_health_listen: Address = Field(
        "", description="host:port of a gRPC health server for the picker alone, such as 0.0.0.0:9003; empty: none"
    )
    picker_tls_cert: Path | None = Field(
        None,
        description="certificate chain (PEM file) of the picker and its health server, whose callers then need no "
        "certificate; unset: TLS as of the router",
    )
    picker_tls_key: Path | None = Field(None, description="private key of picker-tls-cert (PEM file)")
    picker_gateways: AddressList = Field(
        [],
        description="host:port of the gateways (routing direct) that picked requests go to; names resolve to all "
        "addresses; empty: requests go to the HTTP servers of the workers",
    )
    picker_fallbacks: int = Field(
        2,
        ge=0,
        le=16,
        description="number of endpoints to try after the chosen one; 0 for clusters of type ORIGINAL_DST",
    )
    picker_body_mb: int = Field(
        10,
        ge=1,
        description="longest request body of the picker, MiB; the same as the gateways' max-body-mb; all bodies "
        "together may take four times as much, and at least 64 MiB",
    )
    picker_close_after_choice: bool = Field(
        False,
        description="the picker ends its stream once an endpoint is chosen: cheaper, but bookings end by the load "
        "reports of workers or by --reservation-ttl-s",
    )
    picker_objectives: CommaList = Field(
        [], description="names of inference objectives with their priorities, such as chat=10,batch=-5; higher is first"
    )
    picker_notice_s: float = Field(
        5.0,
        ge=0,
        description="seconds for which a stopping picker reports NOT_SERVING and still serves; longer than the "
        "interval of Envoy's health checks, so that no request finds it gone",
    )
    picker_receipts: bool = Field(
        False,
        description="answer requests with the header x-sluice-receipt: true with a route receipt, which names workers "
        "and shows what their caches are expected to hold",
    )
    lease_ms: int = Field(
        6_000, ge=300, description="lease of a worker in milliseconds; without a heartbeat for this long it is removed"
    )
    owner_lease_ms: int = Field(
        4_000, ge=300, description="reservations of an owner disconnected for this many milliseconds are released"
    )
    reservation_ttl_s: float = Field(600.0, gt=0, description="lifetime in seconds of a reservation that is not freed")
