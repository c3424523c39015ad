"""Settings of TLS and tokens: the service's certificates and tokens, and which callers it accepts."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings


class TlsSettings(BaseSettings):
    """TLS between services. Files are PEM and reloaded on change; all unset: plain text, for loopback only."""

    tls_cert: Path | None = Field(None, description="certificate chain of this service (PEM file)")
    tls_key: Path | None = Field(None, description="private key of tls-cert (PEM file)")
    tls_ca: Path | None = Field(None, description="CA certificates this service trusts (PEM file)")
    tls_require_client_cert: bool = Field(
        False, description="reject callers without a certificate signed by tls-ca (mTLS)"
    )
    tls_trust_domain: str = Field(
        "sluice",
        pattern=r"^[a-z0-9._-]*$",
        description="with tls-require-client-cert: callers are identified by a URI spiffe://TRUST-DOMAIN/SERVICE in "
        "their certificates, and those without it may only call health; empty: any valid certificate may call any RPC",
    )
    tls_worker_name: str = Field(
        "",
        description="expected name in the certificates of peers addressed by IP, such as workers in pods; "
        "empty: the certificate must contain the IP address",
    )


class HttpsSettings(BaseSettings):
    """HTTPS for clients of the gateway; tls-cert is for other services."""

    https_cert: Path | None = Field(None, description="certificate chain for HTTP clients (PEM file); unset: HTTP")
    https_key: Path | None = Field(None, description="private key of https-cert (PEM file)")
    https_client_ca: Path | None = Field(
        None, description="CA certificates (PEM file); HTTP clients must present a certificate signed by one of them"
    )


class AccessSettings(BaseSettings):
    """Authentication of this service's callers; both tokens unset: every caller is accepted."""

    token: SecretStr = Field(
        SecretStr(""), description="token accepted for every call, for development; in production use tokens-file"
    )
    tokens_file: Path | None = Field(
        None,
        description="file with a line sha256:HEX CALLER for each accepted token, where CALLER is the service, such as "
        "gateway, or the worker, worker/ID, that sends it; reloaded when it changes; created by `sluice tokens`",
    )
    open_health: bool = Field(
        True, description="serve health and reflection to callers without a token or certificate name"
    )


class PeerTokenSettings(BaseSettings):
    """Tokens this service sends to those it calls; both unset: none."""

    peer_token: SecretStr = Field(
        SecretStr(""), description="TOKEN CALLEE: a token and the service it is sent to, such as worker"
    )
    peer_token_file: Path | None = Field(
        None,
        description="file with a line TOKEN CALLEE for each service that this one calls (worker/ID for one worker); "
        "the first line for a service is used; reloaded when it changes; created by `sluice tokens`",
    )
