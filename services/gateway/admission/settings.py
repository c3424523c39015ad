"""Settings of admission."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field, SecretStr

from services.common.base.errors import SluiceError
from services.common.redis.target import RedisLoginSettings
from services.common.settings.service import CommaList
from services.gateway.admission import scopes
from services.gateway.admission.tenants import TenantSalt


def _scopes(names: list[str] | None) -> list[str] | None:
    try:
        scopes.parse(names or ())
    except SluiceError as error:
        raise ValueError(error.message) from error
    return names


ScopeList = Annotated[CommaList | None, AfterValidator(_scopes)]


class AdmissionSettings(RedisLoginSettings):
    """Settings of API keys, limits and the queue."""

    api_keys_file: Path | None = Field(
        None, description="file of `sluice keys`; requests must contain one of its keys; unset: no key is required"
    )
    anonymous_scopes: ScopeList = Field(
        None,
        description="scopes of requests to a gateway without API keys: infer, priority, pin-worker, template, operate; "
        "unset: all of them if clients can only connect on a loopback address, else infer",
    )
    published_host: str = Field(
        "",
        description="host address on which a container publishes the gateway's port, if not the one it listens on; "
        "determines, like listen, whether clients can only connect on a loopback address",
    )
    tenant_salt: TenantSalt = Field(
        "auto",
        description="separate tenants in the prefix cache; auto: once the file of API keys has two tenants",
    )
    limits_redis_url: SecretStr = Field(
        SecretStr(""),
        description="Redis in which gateways share the limits of API keys, in the forms of the router's redis-url; "
        "empty: each gateway applies the limits on its own",
    )
    max_requests: int = Field(4096, ge=1, description="maximum number of requests served concurrently; more are queued")
    max_requests_per_tenant: int = Field(
        0,
        ge=0,
        description="maximum number of requests of a tenant served concurrently; more are rejected with 429; 0: three "
        "quarters of max-requests once the file of API keys has two tenants, else all",
    )
    max_waiting: int = Field(1024, ge=0, description="maximum number of queued requests; more are rejected with 503")
    queue_timeout_s: float = Field(
        10, gt=0, description="longest wait in the queue before a request is rejected with 503, s"
    )
