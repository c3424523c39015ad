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
    tls_trust_domain: str = Field(
        "sluice",
        pattern=r"^[a-z0-9._-]*$",
        description="with tls-require-client-cert: callers are identified by a URI spiffe://TRUST-DOMAIN/SERVICE in "
        "their certificates, and one without it may ask for health only; empty: every certificate may call everything",
    )
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
    """Callers of this service; both unset: every caller that reaches it."""

    token: SecretStr = Field(
        SecretStr(""), description="token that is good for every call, for development; otherwise see tokens-file"
    )
    tokens_file: Path | None = Field(
        None,
        description="file with a line sha256:HEX CALLER for each accepted token, CALLER the one service, such as "
        "gateway, or the one worker, worker/ID, that shows it; read again when it changes; made by `sluice tokens`",
    )
    open_health: bool = Field(True, description="health and reflection need no token and no name in a certificate")


class PeerTokenSettings(BaseSettings):
    """What this service shows the services that it calls; both unset: nothing."""

    peer_token: SecretStr = Field(
        SecretStr(""), description="TOKEN CALLEE: a token and the one service that it is shown to, such as worker"
    )
    peer_token_file: Path | None = Field(
        None,
        description="file with a line TOKEN CALLEE for each service that this one calls (worker/ID for one worker); "
        "the first line for a service counts; read again when it changes; made by `sluice tokens`",
    )


class RouterTokenSettings(BaseSettings):
    """The token for the router, where it is kept apart from the others; both unset: peer-token."""

    router_token: SecretStr = Field(SecretStr(""), description="token to show to the router only")
    router_token_file: Path | None = Field(
        None, description="file whose first line is the token to show to the router, read again when it changes"
    )
