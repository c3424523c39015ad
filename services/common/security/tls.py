"""TLS and mTLS from PEM files, for servers and channels; new connections use the current files."""

from __future__ import annotations

import logging
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

from services.common.base.errors import ErrorKind, SluiceError
from services.common.security.bearer_tokens import ShownTokens, shown_tokens
from services.common.security.file_watcher import WatchedFiles
from services.common.security.settings import HttpsSettings, PeerTokenSettings, TlsSettings

log = logging.getLogger(__name__)

_ROUND_TRIPS = 4
"""More than a handshake needs."""


class PeerCredentials(grpc.ChannelCredentials):
    """TLS credentials, tokens, or both, for `open_channel`.

    Args:
        tls: the current TLS credentials; None for plain text.
        tokens: returns the token for a service; None sends none.
        ip_name: expected name in the certificates of peers addressed by IP; empty: the address itself.
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
    """The settings' names of the files, for messages."""

    certificate: str = "tls-cert"
    key: str = "tls-key"
    authorities: str = "tls-ca"


@dataclass(frozen=True)
class Identity:
    """PEM files that belong together; each is None if unset."""

    certificate: Path | None
    key: Path | None
    authorities: Path | None
    names: _Names = _Names()

    @property
    def paths(self) -> Sequence[Path]:
        """The files that are set."""
        return [path for path in (self.certificate, self.key, self.authorities) if path is not None]

    def context(self, require_client_cert: bool) -> ssl.SSLContext:
        """Returns a server context from the current files; raises SluiceError when they are missing or do not match."""
        assert self.certificate is not None
        assert self.key is not None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        for path, name in ((self.certificate, self.names.certificate), (self.key, self.names.key)):
            _read(path, name)
        try:
            # Without a password callback, OpenSSL would prompt on the terminal for an encrypted key.
            context.load_cert_chain(self.certificate, self.key, password=lambda: "")
        except (OSError, ValueError) as error:
            raise _invalid(
                f"{self.names.certificate} {self.certificate} and {self.names.key} {self.key} must be a certificate "
                "and its unencrypted key in PEM format.",
                self.names.certificate,
            ) from error
        if reason := refusal(context, self.certificate):
            log.warning("%s %s will be rejected by all peers: %s", self.names.certificate, self.certificate, reason)
        if self.authorities is not None:
            _trust(context, self.authorities, self.names.authorities)
        if require_client_cert:
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def material(self) -> _Material:
        """Returns the checked content of the files.

        gRPC accepts invalid files and fails later with the same error as for a port in use.
        """
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
    """A server context that uses the current files for every new connection."""

    _current: WatchedFiles[ssl.SSLContext]

    def __new__(cls, current: WatchedFiles[ssl.SSLContext]) -> RenewingContext:
        context = super().__new__(cls, ssl.PROTOCOL_TLS_SERVER)
        context._current = current
        return context

    def wrap_bio(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        return self._current.value.wrap_bio(*args, **kwargs)

    def wrap_socket(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        return self._current.value.wrap_socket(*args, **kwargs)


def server_credentials(settings: TlsSettings) -> grpc.ServerCredentials | None:
    """Returns a server's credentials, None for plain text; raises SluiceError for missing or mismatched files."""
    identity = _server_identity(settings)
    if identity is None:
        return None
    files = WatchedFiles("The TLS certificate", identity.paths, lambda: identity.material().of_server())
    return grpc.dynamic_ssl_server_credentials(files.value, lambda: files.value, settings.tls_require_client_cert)


def channel_credentials(settings: TlsSettings) -> PeerCredentials | None:
    """Returns the credentials for channels to other services; None for plain text without tokens.

    With tls-ca the peer must authenticate, with tls-cert and tls-key this service does too, and each peer is sent its
    token, if any.

    Raises:
        SluiceError: when files are missing or do not match.
    """
    _check_pair(settings.tls_cert, settings.tls_key, _Names())
    tokens = _tokens(settings)
    if settings.tls_ca is None:
        return None if tokens is None else PeerCredentials(None, tokens)
    identity = Identity(settings.tls_cert, settings.tls_key, settings.tls_ca)
    files = WatchedFiles("The TLS certificate", identity.paths, lambda: identity.material().of_channel())
    return PeerCredentials(files, tokens, settings.tls_worker_name)


def _tokens(settings: TlsSettings) -> ShownTokens | None:
    if not isinstance(settings, PeerTokenSettings):
        return None
    return shown_tokens(settings.peer_token, settings.peer_token_file)


def https_context(settings: HttpsSettings) -> ssl.SSLContext | None:
    """Returns the gateway's HTTPS context, None for plain HTTP; raises SluiceError for missing or mismatched files."""
    names = _Names("https-cert", "https-key", "https-client-ca")
    _check_pair(settings.https_cert, settings.https_key, names)
    if settings.https_cert is None:
        if settings.https_client_ca is not None:
            raise _invalid("https-client-ca requires https-cert and https-key; set both.", "https-client-ca")
        return None
    identity = Identity(settings.https_cert, settings.https_key, settings.https_client_ca, names)
    return _renewing(identity, settings.https_client_ca is not None)


def metrics_context(settings: TlsSettings) -> ssl.SSLContext:
    """Returns the metrics endpoint's context, as strict as gRPC's; raises SluiceError without a certificate."""
    context = server_context(settings)
    if context is None:
        raise _invalid("metrics-tls requires tls-cert and tls-key; set both.", "metrics-tls")
    return context


def server_context(settings: TlsSettings) -> ssl.SSLContext | None:
    """Returns the context of a server other than gRPC's, as strict as that; None for plain text."""
    identity = _server_identity(settings)
    return None if identity is None else _renewing(identity, settings.tls_require_client_cert)


def _renewing(identity: Identity, require_client_cert: bool) -> ssl.SSLContext:
    return RenewingContext(
        WatchedFiles("The TLS certificate", identity.paths, lambda: identity.context(require_client_cert))
    )


def _server_identity(settings: TlsSettings) -> Identity | None:
    _check_pair(settings.tls_cert, settings.tls_key, _Names())
    if settings.tls_cert is None:
        if settings.tls_require_client_cert:
            raise _invalid(
                "tls-require-client-cert requires tls-cert, tls-key and tls-ca; set all three.",
                "tls-require-client-cert",
            )
        return None
    if settings.tls_require_client_cert and settings.tls_ca is None:
        raise _invalid("tls-require-client-cert requires tls-ca; set it.", "tls-require-client-cert")
    return Identity(settings.tls_cert, settings.tls_key, settings.tls_ca)


def _check_pair(certificate: Path | None, key: Path | None, names: _Names) -> None:
    if (certificate is None) != (key is None):
        raise _invalid(f"{names.certificate} and {names.key} must be set together; one is missing.", names.certificate)


def _read(path: Path, what: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise _invalid(f"{what} {path} cannot be read: {error.strerror}.", what) from error


def _trust(context: ssl.SSLContext, authorities: Path, what: str) -> None:
    try:
        context.load_verify_locations(cadata=_read(authorities, what).decode("ascii", "replace"))
    except (ssl.SSLError, ValueError) as error:
        raise _invalid(f"{what} {authorities} contains no certificate in PEM format.", what) from error


def _invalid(message: str, param: str) -> SluiceError:
    return SluiceError(ErrorKind.FAILED_PRECONDITION, message, param=param)


def refusal(server: ssl.SSLContext, certificate: Path) -> str:
    """Returns OpenSSL's reason, such as "certificate has expired"; empty when a peer that trusts it accepts it.

    Args:
        server: has the certificate and its key, and requests no client certificate.
        certificate: the certificate, for the client to trust.
    """
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VerifyFlags.VERIFY_X509_PARTIAL_CHAIN
    client.load_verify_locations(certificate)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (client.wrap_bio(to_client, to_server), server.wrap_bio(to_server, to_client, server_side=True))
    for end in ends * _ROUND_TRIPS:
        try:
            end.do_handshake()
        except ssl.SSLWantReadError:
            continue
        except ssl.SSLCertVerificationError as error:
            return error.verify_message
        except ssl.SSLError as error:
            return error.reason
    return ""
