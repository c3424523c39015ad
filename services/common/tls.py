"""TLS and mTLS from files, for servers and channels."""

from __future__ import annotations

import ssl
from pathlib import Path

import grpc

from services.common.errors import ErrorKind, SluiceError
from services.common.settings import TlsSettings


def _read(path: Path, what: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise SluiceError(
            ErrorKind.FAILED_PRECONDITION, f"{what} {path} cannot be read: {error.strerror}.", param=what
        ) from error


def _check_pair(certificate: Path, key: Path) -> None:
    """gRPC would take any bytes here and fail later, as if the port were taken."""
    try:
        # Without a password callback OpenSSL would ask on the terminal for that of an encrypted key.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password=lambda: "")
    except (ssl.SSLError, ValueError) as error:
        raise SluiceError(
            ErrorKind.FAILED_PRECONDITION,
            f"tls-cert {certificate} and tls-key {key} are no certificate with its unencrypted key in PEM form.",
            param="tls-cert",
        ) from error


def server_credentials(settings: TlsSettings) -> grpc.ServerCredentials | None:
    """Credentials for a server, None for plain text; SluiceError when files are missing or do not fit together."""
    if settings.tls_cert is None and settings.tls_key is None:
        if settings.tls_require_client_cert:
            raise SluiceError(
                ErrorKind.FAILED_PRECONDITION, "tls-require-client-cert needs tls-cert, tls-key and tls-ca."
            )
        return None
    if settings.tls_cert is None or settings.tls_key is None:
        raise SluiceError(ErrorKind.FAILED_PRECONDITION, "tls-cert and tls-key belong together; one is missing.")
    if settings.tls_require_client_cert and settings.tls_ca is None:
        raise SluiceError(ErrorKind.FAILED_PRECONDITION, "tls-require-client-cert needs tls-ca.")
    pair = (_read(settings.tls_key, "tls-key"), _read(settings.tls_cert, "tls-cert"))
    authorities = _read(settings.tls_ca, "tls-ca") if settings.tls_ca else None
    _check_pair(settings.tls_cert, settings.tls_key)
    return grpc.ssl_server_credentials([pair], authorities, settings.tls_require_client_cert)


def channel_credentials(settings: TlsSettings) -> grpc.ChannelCredentials | None:
    """Credentials for calls to other services, None for plain text: with tls-ca the peer must prove itself, with
    tls-cert and tls-key this service does too."""
    if settings.tls_ca is None:
        return None
    both = settings.tls_cert is not None and settings.tls_key is not None
    return grpc.ssl_channel_credentials(
        _read(settings.tls_ca, "tls-ca"),
        _read(settings.tls_key, "tls-key") if both and settings.tls_key else None,
        _read(settings.tls_cert, "tls-cert") if both and settings.tls_cert else None,
    )
