"""Settings of admission."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, SecretStr

from services.common.redis.settings import RedisLoginSettings


class AdmissionSettings(RedisLoginSettings):
    """Who may ask this gateway, and how much at once."""

    api_keys_file: Path | None = Field(
        None, description="file of `sluice keys`; clients must show one of its keys; unset: everybody may ask"
    )
    limits_redis_url: SecretStr = Field(
        SecretStr(""),
        description="where gateways share the limits of API keys, in the forms of the router's redis-url; empty: each "
        "gateway counts alone",
    )
    max_requests: int = Field(4096, ge=1, description="requests served at once; more wait in line")
    max_waiting: int = Field(1024, ge=0, description="requests in line; more are refused with 503")
    line_timeout_s: float = Field(10, gt=0, description="longest wait in line before a request is refused with 503")
