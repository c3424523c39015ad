"""What a command shows to the suite and which authorities it trusts: the same four flags everywhere."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from services.common.errors import SluiceError
from services.common.security.tls import PeerCredentials, channel_credentials
from services.common.settings import TlsSettings

Tls = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR", help="folder of `sluice certs`: ca.pem is trusted, client.pem shown; unset: plain text"
    ),
]
TlsCa = Annotated[
    Path | None, typer.Option(metavar="FILE", help="instead of --tls: authorities that are trusted (PEM file)")
]
TlsCert = Annotated[Path | None, typer.Option(metavar="FILE", help="with --tls-ca: certificate to show (PEM file)")]
TlsKey = Annotated[Path | None, typer.Option(metavar="FILE", help="private key of --tls-cert (PEM file)")]

AUTHORITY, CLIENT, CLIENT_KEY = "ca.pem", "client.pem", "client.key"


class BadTrust(Exception):
    """The TLS flags cannot be used; the text is one sentence that names the flag."""


@dataclass(frozen=True)
class Trust:
    """The TLS flags of a command; all unset is plain text."""

    folder: Path | None = None
    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None

    @property
    def encrypted(self) -> bool:
        """Whether the suite is reached over TLS."""
        return self.folder is not None or self.ca is not None

    def check(self) -> None:
        """Raises BadTrust for flags that can never work."""
        files = self.ca or self.cert or self.key
        if self.folder is not None and files:
            raise BadTrust("--tls names a folder with all the files: leave --tls-ca, --tls-cert and --tls-key out")
        if self.folder is not None and not (self.folder / AUTHORITY).is_file():
            raise BadTrust(f"--tls {self.folder} holds no {AUTHORITY}; `sluice certs {self.folder}` makes a set")
        if files and (self.ca is None or (self.cert is None) is not (self.key is None)):
            raise BadTrust("--tls-cert and --tls-key need each other and --tls-ca")

    def settings(self) -> TlsSettings:
        """The files, as services name them; without a certificate where the folder holds none for clients."""
        if self.folder is None:
            return TlsSettings(tls_ca=self.ca, tls_cert=self.cert, tls_key=self.key)
        shown = (self.folder / CLIENT).is_file()
        return TlsSettings(
            tls_ca=self.folder / AUTHORITY,
            tls_cert=self.folder / CLIENT if shown else None,
            tls_key=self.folder / CLIENT_KEY if shown else None,
        )

    def credentials(self) -> PeerCredentials | None:
        """For gRPC; None is plain text. Raises BadTrust when the files cannot be used."""
        self.check()
        if not self.encrypted:
            return None
        try:
            return channel_credentials(self.settings())
        except SluiceError as error:
            flag = f"--tls {self.folder}" if self.folder is not None else f"--tls-ca {self.ca}"
            raise BadTrust(f"{flag}: {error.message}") from error

    def context(self) -> ssl.SSLContext:
        """For HTTPS: checks the gateway's certificate, and shows this one's to a gateway that requires one.

        The files are expected to be sound: `credentials` checks them.
        """
        files = self.settings()
        context = ssl.create_default_context(cafile=None if files.tls_ca is None else str(files.tls_ca))
        if files.tls_cert is not None and files.tls_key is not None:
            context.load_cert_chain(files.tls_cert, files.tls_key)
        return context
