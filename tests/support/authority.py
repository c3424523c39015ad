"""Certificates for tests: of one authority, of another, expired, and replaced while they are in use."""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

import trustme

from services.common.settings import TlsSettings


class Authority:
    """Issues certificates into a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.folder.mkdir(parents=True, exist_ok=True)
        self.ca = trustme.CA()
        self.file = folder / "ca.pem"
        self.ca.cert_pem.write_to_path(self.file)

    def issue(self, name: str, *, expired: bool = False) -> TlsSettings:
        """The settings of somebody who shows a certificate of this authority and trusts it; replaces an earlier one."""
        ends = datetime.now(UTC) - timedelta(hours=1) if expired else None
        starts = datetime.now(UTC) - timedelta(days=2) if expired else None
        made = self.ca.issue_cert("localhost", "127.0.0.1", f"{name}.test", not_before=starts, not_after=ends)
        certificate, key = self.folder / f"{name}.pem", self.folder / f"{name}.key"
        # The certificate first: until the key is there as well the two do not fit, and nobody may mind.
        for path, content in ((certificate, made.cert_chain_pems[0].bytes()), (key, made.private_key_pem.bytes())):
            fresh = path.with_suffix(".fresh")
            fresh.write_bytes(content)
            os.replace(fresh, path)
        return TlsSettings(tls_cert=certificate, tls_key=key, tls_ca=self.file)
