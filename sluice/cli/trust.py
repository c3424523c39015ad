"""The TLS flags of the commands: the certificate they present and the authorities they trust."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from services.common.base.errors import SluiceError
from services.common.security.tls import PeerCredentials, channel_credentials
from services.common.settings.service import TlsSettings
from sluice.cli.errors import BadFlag
from sluice.cli.flags import flag

AUTHORITY, CLIENT, CLIENT_KEY = "ca.pem", "client.pem", "client.key"


@dataclass(frozen=True)
class Trust:
    """Holds the TLS flags of a command; all unset means plain text."""

    folder: Path | None = flag(
        None,
        "folder of `sluice certs`: trusts ca.pem and presents client.pem; unset: plain text",
        "--tls",
        metavar="DIR",
    )
    ca: Path | None = flag(None, "trusted authorities (PEM file), instead of --tls", "--tls-ca", metavar="FILE")
    cert: Path | None = flag(None, "client certificate (PEM file); needs --tls-ca", "--tls-cert", metavar="FILE")
    key: Path | None = flag(None, "private key of --tls-cert (PEM file)", "--tls-key", metavar="FILE")

    @property
    def encrypted(self) -> bool:
        """Whether connections use TLS."""
        return self.folder is not None or self.ca is not None

    def check(self) -> None:
        """Raises BadFlag for flags that are incomplete or contradictory."""
        files = self.ca or self.cert or self.key
        if self.folder is not None and files:
            raise BadFlag("--tls names a folder with all files; omit --tls-ca, --tls-cert and --tls-key")
        if self.folder is not None and not (self.folder / AUTHORITY).is_file():
            raise BadFlag(
                f"--tls {self.folder} has no {AUTHORITY}; create the certificates with `sluice certs {self.folder}`"
            )
        if files and (self.ca is None or (self.cert is None) is not (self.key is None)):
            raise BadFlag("--tls-cert and --tls-key must be passed together, with --tls-ca")

    def settings(self) -> TlsSettings:
        """Returns the files as TLS settings, without a certificate if the folder has no client certificate."""
        if self.folder is None:
            return TlsSettings(tls_ca=self.ca, tls_cert=self.cert, tls_key=self.key)
        has_client = (self.folder / CLIENT).is_file()
        return TlsSettings(
            tls_ca=self.folder / AUTHORITY,
            tls_cert=self.folder / CLIENT if has_client else None,
            tls_key=self.folder / CLIENT_KEY if has_client else None,
        )

    def credentials(self) -> PeerCredentials | None:
        """Returns credentials for gRPC, None for plain text; raises BadFlag if the files cannot be used."""
        self.check()
        if not self.encrypted:
            return None
        try:
            return channel_credentials(self.settings())
        except SluiceError as error:
            flag = f"--tls {self.folder}" if self.folder is not None else f"--tls-ca {self.ca}"
            raise BadFlag(f"{flag}: {error.message}") from error

    def context(self) -> ssl.SSLContext:
        """Returns a context for HTTPS that verifies the gateway and presents the client certificate, if any.

        Call `credentials` first: it validates the files.
        """
        files = self.settings()
        context = ssl.create_default_context(cafile=None if files.tls_ca is None else str(files.tls_ca))
        if files.tls_cert is not None and files.tls_key is not None:
            context.load_cert_chain(files.tls_cert, files.tls_key)
        return context
