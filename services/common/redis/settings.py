"""Settings of who one is to Redis."""

from __future__ import annotations

from pydantic import Field, FilePath, SecretStr
from pydantic_settings import BaseSettings

from services.common.redis.target import Credentials


class RedisLoginSettings(BaseSettings):
    """What a Redis URL need not carry. Files are PEM and read again for every new connection."""

    redis_password: SecretStr = Field(SecretStr(""), description="of Redis, if the URL does not give it")
    redis_sentinel_password: SecretStr = Field(SecretStr(""), description="of the sentinels")
    redis_ca_file: FilePath | None = Field(None, description="PEM file that Redis' certificate is checked with")
    redis_cert_file: FilePath | None = Field(None, description="PEM file with the certificate to show to Redis")
    redis_key_file: FilePath | None = Field(None, description="PEM file with its key")

    @property
    def redis_credentials(self) -> Credentials:
        """The same, for `parse`."""
        return Credentials(
            self.redis_password.get_secret_value(),
            self.redis_sentinel_password.get_secret_value(),
            self.redis_ca_file,
            self.redis_cert_file,
            self.redis_key_file,
        )
