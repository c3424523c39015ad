"""Settings of trust: what a service shows, whom it believes, and who may call it."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings


class TlsSettings(BaseSettings):
    """Trust between services. Files are PEM and read again when they change; all unset means plain text, which is
    meant for loopback."""

    tls_cert: Path | None = Field(None, description="certificate chain this service shows (PEM file)")
    tls_key: Path | None = Field(None, description="private key of tls-cert (PEM file)")
    tls_ca: Path | None = Field(None, description="authorities this service trusts (PEM file)")
    tls_require_client_cert: bool = Field(False, description="refuse callers without a certificate of tls-ca (mTLS)")
    tls_worker_name: str = Field(
        "",
        description="name in the certificates of peers that are known by IP address only, as workers are by their "
        "pod's; empty: the certificate must carry the address",
    )


class HttpsSettings(BaseSettings):
    """HTTPS for clients of the gateway; its tls-cert is what it shows to services."""

    https_cert: Path | None = Field(None, description="certificate chain shown to HTTP clients (PEM file); unset: HTTP")
    https_key: Path | None = Field(None, description="private key of https-cert (PEM file)")
    https_client_ca: Path | None = Field(
        None, description="authorities (PEM file); HTTP clients need a certificate of one of them"
    )


class AccessSettings(BaseSettings):
    """Who may call this service; both unset: everybody who reaches it."""

    token: SecretStr = Field(SecretStr(""), description="token that callers must show; empty: see tokens-file")
    tokens_file: Path | None = Field(
        None,
        description="file with one accepted token a line, after it the one service that may show it, such as gateway; "
        "read again when it changes, so that tokens can rotate",
    )
    open_health: bool = Field(True, description="health and reflection need no token")


class PeerTokenSettings(BaseSettings):
    """What this service shows the services that it calls; both unset: nothing."""

    peer_token: SecretStr = Field(SecretStr(""), description="token to show every service that this one calls")
    peer_token_file: Path | None = Field(
        None, description="file whose first line is that token, read again when it changes"
    )


class RouterTokenSettings(BaseSettings):
    """What callers of a router that wants a token of its own show it; both unset: peer-token."""

    router_token: SecretStr = Field(SecretStr(""), description="token to show the router, if it is not peer-token")
    router_token_file: Path | None = Field(
        None, description="file whose first line is the token to show the router, read again when it changes"
    )
