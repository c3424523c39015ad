"""TLS and mTLS from files, for servers and channels; new connections take the files as they are then."""

from __future__ import annotations

import logging
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

from services.common.errors import ErrorKind, SluiceError
from services.common.file_watcher import WatchedFiles
from services.common.security.bearer_tokens import ShownTokens, shown_tokens
from services.common.security.certificate_check import refusal
from services.common.security.settings import HttpsSettings, PeerTokenSettings, RouterTokenSettings, TlsSettings

log = logging.getLogger(__name__)


class PeerCredentials(grpc.ChannelCredentials):
    """TLS, tokens, or both; `open_channel` understands them.

    Args:
        tls: what TLS takes now; None for plain text.
        tokens: returns the token to show to a service; None shows none.
        ip_name: name in the certificates of peers that are known by IP address only; empty: the address itself.
    """

    def __init__(
        self,
        tls: WatchedFiles[grpc.ChannelCredentials] | None,
        tokens: ShownTokens | None = None,
        ip_name: str = "",
    ) -> None:
        super().__init__(None if tls is None else vars(tls.value)["_credentials"])  # as they are now, for grpc itself
        self.tls = tls
        self.tokens = tokens
        self.ip_name = ip_name


@dataclass(frozen=True)
class _Names:
    """What the settings call the files, for messages."""

    certificate: str = "tls-cert"
    key: str = "tls-key"
    authorities: str = "tls-ca"


@dataclass(frozen=True)
class Identity:
    """PEM files that belong together, each None where there is none."""

    certificate: Path | None
    key: Path | None
    authorities: Path | None
    names: _Names = _Names()

    @property
    def paths(self) -> Sequence[Path]:
        """Those that are there."""
        return [path for path in (self.certificate, self.key, self.authorities) if path is not None]

    def context(self, require_client_cert: bool) -> ssl.SSLContext:
        """A server's context from the files as they are now; SluiceError when one is missing or they do not fit."""
        assert self.certificate is not None
        assert self.key is not None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        for path, name in ((self.certificate, self.names.certificate), (self.key, self.names.key)):
            _read(path, name)
        try:
            # Without a password callback OpenSSL would ask on the terminal for that of an encrypted key.
            context.load_cert_chain(self.certificate, self.key, password=lambda: "")
        except (OSError, ValueError) as error:
            raise _wrong(
                f"{self.names.certificate} {self.certificate} and {self.names.key} {self.key} are no certificate with "
                "its unencrypted key in PEM form.",
                self.names.certificate,
            ) from error
        if why := refusal(context, self.certificate):
            log.warning("%s %s will be refused by everybody: %s", self.names.certificate, self.certificate, why)
        if self.authorities is not None:
            _trust(context, self.authorities, self.names.authorities)
        if require_client_cert:
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def material(self) -> _Material:
        """The bytes of the files, checked: gRPC would take any, and fail later as if the port were taken."""
        if self.certificate is not None:
            self.context(False)
        elif self.authorities is not None:
            _trust(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), self.authorities, self.names.authorities)
        return _Material(
            _read(self.certificate, self.names.certificate) if self.certificate else None,
            _read(self.key, self.names.key) if self.key else None,
            _read(self.authorities, self.names.authorities) if self.authorities else None,
        )


@dataclass(frozen=True)
class _Material:
    certificate: bytes | None
    key: bytes | None
    authorities: bytes | None

    def of_server(self) -> grpc.ServerCertificateConfiguration:
        assert self.key is not None
        assert self.certificate is not None
        return grpc.ssl_server_certificate_configuration([(self.key, self.certificate)], self.authorities)

    def of_channel(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(self.authorities, self.key, self.certificate)


class RenewingContext(ssl.SSLContext):
    """A server's context whose every new connection takes the files as they are then."""

    _current: WatchedFiles[ssl.SSLContext]

    def __new__(cls, current: WatchedFiles[ssl.SSLContext]) -> RenewingContext:
        context = super().__new__(cls, ssl.PROTOCOL_TLS_SERVER)
        context._current = current
        return context

    def wrap_bio(self, *args, **more):  # type: ignore[no-untyped-def]
        return self._current.value.wrap_bio(*args, **more)

    def wrap_socket(self, *args, **more):  # type: ignore[no-untyped-def]
        return self._current.value.wrap_socket(*args, **more)


def server_credentials(settings: TlsSettings) -> grpc.ServerCredentials | None:
    """Credentials for a server, None for plain text; SluiceError when files are missing or do not fit together."""
    identity = _server_identity(settings)
    if identity is None:
        return None
    files = WatchedFiles("The TLS certificate", identity.paths, lambda: identity.material().of_server())
    return grpc.dynamic_ssl_server_credentials(files.value, lambda: files.value, settings.tls_require_client_cert)


def channel_credentials(settings: TlsSettings) -> PeerCredentials | None:
    """What this service shows to those it calls, None for nothing and plain text: with tls-ca the peer must prove
    itself, with tls-cert and tls-key this service does too, and each peer is shown the token for it, if there is one.

    Raises:
        SluiceError: when files are missing or do not fit together.
    """
    _belong_together(settings.tls_cert, settings.tls_key, _Names())
    tokens = _tokens(settings)
    if settings.tls_ca is None:
        return None if tokens is None else PeerCredentials(None, tokens)
    identity = Identity(settings.tls_cert, settings.tls_key, settings.tls_ca)
    files = WatchedFiles("The TLS certificate", identity.paths, lambda: identity.material().of_channel())
    return PeerCredentials(files, tokens, settings.tls_worker_name)


def _tokens(settings: TlsSettings) -> ShownTokens | None:
    if not isinstance(settings, PeerTokenSettings):
        return None
    router = settings if isinstance(settings, RouterTokenSettings) else RouterTokenSettings.model_construct()
    return shown_tokens(settings.peer_token, settings.peer_token_file, router.router_token, router.router_token_file)


def https_context(settings: HttpsSettings) -> ssl.SSLContext | None:
    """For the gateway's HTTP server, None for plain HTTP; SluiceError when files are missing or do not fit."""
    names = _Names("https-cert", "https-key", "https-client-ca")
    _belong_together(settings.https_cert, settings.https_key, names)
    if settings.https_cert is None:
        if settings.https_client_ca is not None:
            raise _wrong("https-client-ca needs https-cert and https-key.", "https-client-ca")
        return None
    identity = Identity(settings.https_cert, settings.https_key, settings.https_client_ca, names)
    return _renewing(identity, settings.https_client_ca is not None)


def metrics_context(settings: TlsSettings) -> ssl.SSLContext:
    """For the metrics endpoint, as strict as the gRPC server; SluiceError without tls-cert and tls-key."""
    identity = _server_identity(settings)
    if identity is None:
        raise _wrong("metrics-tls needs tls-cert and tls-key.", "metrics-tls")
    return _renewing(identity, settings.tls_require_client_cert)


def _renewing(identity: Identity, require_client_cert: bool) -> ssl.SSLContext:
    return RenewingContext(
        WatchedFiles("The TLS certificate", identity.paths, lambda: identity.context(require_client_cert))
    )


def _server_identity(settings: TlsSettings) -> Identity | None:
    _belong_together(settings.tls_cert, settings.tls_key, _Names())
    if settings.tls_cert is None:
        if settings.tls_require_client_cert:
            raise _wrong("tls-require-client-cert needs tls-cert, tls-key and tls-ca.", "tls-require-client-cert")
        return None
    if settings.tls_require_client_cert and settings.tls_ca is None:
        raise _wrong("tls-require-client-cert needs tls-ca.", "tls-require-client-cert")
    return Identity(settings.tls_cert, settings.tls_key, settings.tls_ca)


def _belong_together(certificate: Path | None, key: Path | None, names: _Names) -> None:
    if (certificate is None) != (key is None):
        raise _wrong(f"{names.certificate} and {names.key} belong together; one is missing.", names.certificate)


def _read(path: Path, what: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise _wrong(f"{what} {path} cannot be read: {error.strerror}.", what) from error


def _trust(context: ssl.SSLContext, authorities: Path, what: str) -> None:
    try:
        context.load_verify_locations(cadata=_read(authorities, what).decode("ascii", "replace"))
    except (ssl.SSLError, ValueError) as error:
        raise _wrong(f"{what} {authorities} holds no certificate in PEM form.", what) from error


def _wrong(message: str, param: str) -> SluiceError:
    return SluiceError(ErrorKind.FAILED_PRECONDITION, message, param=param)
