"""Settings of the router."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, SecretStr

from services.common.redis.settings import RedisLoginSettings
from services.common.settings import AddressList, GrpcServiceSettings, settings_config
from services.router.reservations.cost import PREFILL_LOAD_SCALE

PolicyName = Literal["kv", "round_robin", "random", "least_loaded", "power_of_two"]


class RouterSettings(RedisLoginSettings, GrpcServiceSettings):
    """Chooses the worker that should run a prompt, and keeps the registry, the block index and the load book.

    Every flag is also an environment variable: --log-level is SLUICE_ROUTER_LOG_LEVEL.
    """

    model_config = settings_config("router")

    listen: str = Field("127.0.0.1:50052", description="host:port of the gRPC server")
    redis_url: SecretStr = Field(
        SecretStr(""),
        description="redis://host:port/db shared by all replicas, redis+sentinel://host:port,host:port/service/db or "
        "redis+cluster://host:port,host:port; rediss for TLS; empty: state in this process's memory",
    )
    redis_prefix: str = Field("sluice", min_length=1, pattern=r"^[^{}]+$", description="first part of every Redis key")
    redis_timeout_s: float = Field(1.0, gt=0, description="seconds Redis gets to answer before it counts as away")
    policy: PolicyName = Field("kv", description="how a worker is chosen when the request does not say")
    prefill_load_scale: float = Field(
        PREFILL_LOAD_SCALE, ge=0, description="weight of prefill load against decode load"
    )
    device_credit: float = Field(1.0, ge=0, le=1, description="credit for a block in device memory")
    host_credit: float = Field(0.75, ge=0, le=1, description="credit for a block in the worker's main memory")
    disk_credit: float = Field(0.25, ge=0, le=1, description="credit for a block on disk")
    predicted_credit: float = Field(
        0.9, ge=0, le=1, description="credit for a block nobody reported but that requests sent there must have left"
    )
    predicted_ttl_s: float = Field(
        120.0, gt=0, description="seconds such blocks are believed in where the engine reports no KV events"
    )
    predicted_bridge_s: float = Field(
        2.0, gt=0, description="seconds they are believed in where it does, after the prompt is computed"
    )
    predicted_computing_s: float = Field(
        60.0, gt=0, description="longest a prompt counts as not computed yet, for predictions"
    )
    predicted_blocks: int = Field(100_000, ge=1, description="most such blocks per data-parallel rank")
    temperature: float = Field(0.0, ge=0, description="0: the cheapest worker; above: a softmax over the costs")
    session_ttl_s: float = Field(600.0, gt=0, description="seconds a session is remembered after its last request")
    busy_kv_share: float = Field(
        0.0, ge=0, le=1, description="a worker with this share of its KV blocks booked or in use is busy; 0: never"
    )
    busy_prefill_tokens: int = Field(
        0, ge=0, description="a worker with so many prompt tokens booked and not computed yet is busy; 0: never"
    )
    busy_requests: int = Field(0, ge=0, description="a worker with so many requests booked is busy; 0: never")
    wait_ms: int = Field(
        0, ge=0, description="how long requests that do not say wait in line while all workers are busy, milliseconds"
    )
    line_limit: int = Field(1_000, ge=1, description="requests that wait in line, most of a model")
    wait_for_prefill: bool = Field(
        False, description="while decode workers have no prefill worker: wait for the first one, at most prefill-wait-s"
    )
    enforce_disagg: bool = Field(False, description="after that wait fail instead of letting one worker do it all")
    prefill_wait_s: float = Field(30.0, ge=0, description="longest wait for the first prefill worker, seconds")
    bypass_uncached_tokens: int = Field(
        0, ge=0, description="prompts with no more tokens than this left to compute skip the prefill workers; 0: none"
    )
    preprocess: AddressList = Field(
        [], description="host:port of preprocess, names mean all addresses; empty: queries by OpenAI body are refused"
    )
    preprocess_timeout_s: float = Field(15.0, gt=0, description="longest wait for preprocess")
    lease_ms: int = Field(6_000, ge=300, description="a worker that is silent for this long is gone, milliseconds")
    drift_after_s: float = Field(
        30.0, gt=0, description="seconds after which a reservation must show in its worker's reports or is given back"
    )
    owner_lease_ms: int = Field(
        10_000, ge=300, description="reservations of an owner whose stream is gone for this long are given back, ms"
    )
    decisions_kept: int = Field(1_000, ge=1, le=1_000_000, description="decision records kept by this replica")
    reservation_ttl_s: float = Field(600.0, gt=0, description="seconds until a reservation nobody freed expires")
