"""Settings of admission."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field, SecretStr

from services.common.errors import SluiceError
from services.common.redis.target import RedisLoginSettings
from services.common.settings import CommaList
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
    """Who may ask this gateway, and how much at once."""

    api_keys_file: Path | None = Field(
        None, description="file of `sluice keys`; clients must show one of its keys; unset: everybody may ask"
    )
    anonymous_scopes: ScopeList = Field(
        None,
        description="scopes of requests to a gateway without API keys, of infer, priority, pin-worker, template and "
        "operate; unset: all of them where clients reach it on a loopback address only, else infer",
    )
    published_host: str = Field(
        "",
        description="host on which a container publishes the gateway's port, where that is not the one it listens on; "
        "decides with listen whether clients reach it on a loopback address only",
    )
    tenant_salt: TenantSalt = Field(
        "auto",
        description="keep tenants apart in the prefix cache; auto: as soon as the file of API keys has two tenants",
    )
    limits_redis_url: SecretStr = Field(
        SecretStr(""),
        description="where gateways share the limits of API keys, in the forms of the router's redis-url; empty: each "
        "gateway counts alone",
    )
    max_requests: int = Field(4096, ge=1, description="requests served at once; more wait in line")
    max_waiting: int = Field(1024, ge=0, description="requests in line; more are refused with 503")
    line_timeout_s: float = Field(10, gt=0, description="longest wait in line before a request is refused with 503")
