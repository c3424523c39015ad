"""Certificates and tokens of every process of a suite, each in files of its own, and those of the operator who asks."""

from __future__ import annotations

import shutil
import ssl
from collections.abc import Iterable, Sequence
from datetime import timedelta
from pathlib import Path

from pydantic import SecretStr

from services.common.security.bearer_tokens import shown_tokens
from services.common.security.identity import OPERATOR
from services.common.security.tls import PeerCredentials, channel_credentials
from services.common.settings.service import TlsSettings
from sluice.cli import tokens
from tests.support.data.authority import Authority
from tests.support.faults.access import Access

LASTS = timedelta(days=9)
GATEWAY = "gateway"


class Credentials:
    """What guards a suite: mutual TLS and a token for each caller and callee; HTTPS with the gateways' certificates.

    Args:
        folder: for all files.
        hosts: addresses of processes besides loopback, which certificates name.
        https: whether gateways have HTTPS.
    """

    def __init__(self, folder: Path, hosts: Iterable[str] = (), https: bool = True) -> None:
        self._authority = Authority(folder / "certificates")
        self._hosts = tuple(hosts)
        self._https = https
        self._made = folder / "made-tokens"
        self._given = folder / "tokens"
        tokens.make(self._made, tokens.Options())

    def flags(self, name: str) -> tuple[str, ...]:
        """Returns the flags of a process, and gives it the files that they name."""
        trust = self.issue(name)
        self.give([name])
        files = {"--tls-cert": trust.tls_cert, "--tls-key": trust.tls_key, "--tls-ca": trust.tls_ca}
        files["--peer-token-file"] = self._given / name / tokens.SHOWN
        if _service(name) == GATEWAY:
            files |= {"--https-cert": trust.tls_cert, "--https-key": trust.tls_key} if self._https else {}
        else:
            files["--tokens-file"] = self._given / name / tokens.ACCEPTED
        return ("--tls-require-client-cert", *(word for flag, file in files.items() for word in (flag, str(file))))

    def issue(self, name: str, lasts: timedelta = LASTS) -> TlsSettings:
        """Gives a process a certificate, in place of the one that it has; returns its settings."""
        return self._authority.issue(name, f"spiffe://sluice/{_service(name)}", lasts=lasts, hosts=self._hosts)

    def rotate(self, step: str) -> None:
        """Takes a step of the rotation of all tokens; processes know nothing of it until they are given them."""
        tokens.make(self._made, tokens.Options(rotate=step))

    def give(self, names: Sequence[str]) -> None:
        """Gives processes the token files of their service, in place of those that they have."""
        for name in names:
            for file in (self._made / _service(name)).iterdir():
                (self._given / name).mkdir(parents=True, exist_ok=True)
                fresh = self._given / name / f"{file.name}.fresh"
                shutil.copyfile(file, fresh)
                fresh.replace(fresh.with_suffix(""))

    def access(self) -> Access:
        """Returns how an operator reaches the suite."""
        trust = self.issue(OPERATOR)
        self.give([OPERATOR])
        grpc_trust = channel_credentials(trust)
        assert grpc_trust is not None
        shown = shown_tokens(SecretStr(""), self._given / OPERATOR / tokens.SHOWN)
        context = ssl.create_default_context(cafile=str(trust.tls_ca)) if self._https else None
        return Access(context, PeerCredentials(grpc_trust.tls, shown))


def _service(name: str) -> str:
    """Returns the service of a process."""
    return name.partition("-")[0]
