"""Connection options: TLS, credentials, metadata, keepalive."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from os import PathLike

from sluice_client.renewing import RenewingContext

Credential = str | Callable[[], str]


@dataclass(frozen=True, slots=True)
class Tls:
    """TLS options; with `cert` and `key` also for mTLS. Files are PEM.

    Attributes:
        ca: trusted authorities; None for the machine's.
        cert: client certificate chain; needs `key`.
        key: private key of `cert`, unencrypted.
        server_name: name that the service's certificate must have; empty for the host of the address.
    """

    ca: str | PathLike[str] | None = None
    cert: str | PathLike[str] | None = None
    key: str | PathLike[str] | None = None
    server_name: str = ""

    def context(self) -> ssl.SSLContext:
        """Returns a context that reads the files, and again for a new connection after they have changed.

        Raises:
            OSError: a file is missing or does not match (including ssl.SSLError).
            ValueError: only one of `cert` and `key` is given.
        """
        if (self.cert is None) != (self.key is None):
            raise ValueError("cert and key belong together; pass both or neither")
        files = [file for file in (self.ca, self.cert, self.key) if file is not None]
        return RenewingContext(files, self._read)

    def _read(self) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=self.ca)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["h2"])
        if self.cert is not None:
            # Without a callback OpenSSL would prompt on the terminal for the password of an encrypted key.
            context.load_cert_chain(self.cert, self.key, password=lambda: "")
        return context


@dataclass(frozen=True, slots=True)
class Options:
    """Options that apply to every address of a client.

    Attributes:
        tls: None for plain text.
        token: sent as ``authorization: Bearer …``; a callable is called before each call, so that the token may rotate.
        metadata: called before each call for more metadata, such as ``traceparent``.
        keepalive_s: interval of pings on a connection with running calls; it is closed if a ping gets no response
            within the same time.
    """

    tls: Tls | None = None
    token: Credential = ""
    metadata: Callable[[], Mapping[str, str]] | None = None
    keepalive_s: float = 10.0

    def headers(self) -> dict[str, str]:
        """Returns the metadata of the next call."""
        headers = dict(self.metadata()) if self.metadata is not None else {}
        token = self.token if isinstance(self.token, str) else self.token()
        if token:
            if not (token.isascii() and token.isprintable()):
                raise ValueError(
                    "the token contains characters that are invalid in a header"
                )  # without the secret itself
            headers["authorization"] = f"Bearer {token}"
        return headers


def host_and_port(address: str) -> tuple[str, int]:
    """Splits host:port, including [::1]:port; raises ValueError for anything else."""
    host, _, port = address.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    if not bare or not port.isdecimal() or not 0 < int(port) < 65536 or (":" in bare and host == bare):
        raise ValueError(f"{address!r} is not a host:port")
    return bare, int(port)
