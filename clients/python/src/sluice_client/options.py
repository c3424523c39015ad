"""How a client reaches a service: address, trust, credentials, keepalive."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from os import PathLike

from sluice_client.renewing import RenewingContext

Credential = str | Callable[[], str]


@dataclass(frozen=True, slots=True)
class Tls:
    """Encrypts and proves the service's identity, and with cert and key the client's too (mTLS). Files are PEM.

    Attributes:
        ca: authorities to trust; None for those the machine trusts.
        cert: certificate chain to show; needs `key`.
        key: its private key, unencrypted.
        server_name: name that the service's certificate must carry; empty for the host of the address.
    """

    ca: str | PathLike[str] | None = None
    cert: str | PathLike[str] | None = None
    key: str | PathLike[str] | None = None
    server_name: str = ""

    def context(self) -> ssl.SSLContext:
        """Reads the files, and again for a new connection when they have changed.

        OSError (ssl.SSLError included) when one is missing or does not fit, ValueError for a key without its
        certificate or the other way round.
        """
        if (self.cert is None) != (self.key is None):
            raise ValueError("cert and key belong together; one is missing")
        files = [file for file in (self.ca, self.cert, self.key) if file is not None]
        return RenewingContext(files, self._read)

    def _read(self) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=self.ca)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["h2"])
        if self.cert is not None:
            # Without a callback OpenSSL would ask on the terminal for the password of an encrypted key.
            context.load_cert_chain(self.cert, self.key, password=lambda: "")
        return context


@dataclass(frozen=True, slots=True)
class Options:
    """What is the same for every address of a client.

    Attributes:
        tls: None for plain text.
        token: sent as ``authorization: Bearer …``; a callable is asked before each call, so that it may rotate.
        metadata: asked before each call for more of it, such as ``traceparent``.
        keepalive_s: a connection with calls under way is tested this often; one that does not react in the same
            time is given up.
    """

    tls: Tls | None = None
    token: Credential = ""
    metadata: Callable[[], Mapping[str, str]] | None = None
    keepalive_s: float = 10.0

    def headers(self) -> dict[str, str]:
        """Metadata of the next call."""
        headers = dict(self.metadata()) if self.metadata is not None else {}
        token = self.token if isinstance(self.token, str) else self.token()
        if token:
            if not (token.isascii() and token.isprintable()):
                raise ValueError("the token holds characters that no header can carry")  # and is not repeated here
            headers["authorization"] = f"Bearer {token}"
        return headers


def host_and_port(address: str) -> tuple[str, int]:
    """Splits host:port, [::1]:port included; ValueError for anything else."""
    host, _, port = address.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    if not bare or not port.isdecimal() or not 0 < int(port) < 65536 or (":" in bare and host == bare):
        raise ValueError(f"{address!r} is no host:port")
    return bare, int(port)
