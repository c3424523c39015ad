"""Certificates for tests: of one authority, of another, expired, naming a caller or none, and replaced while in use."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import trustme
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from services.common.settings.service import TlsSettings

OPERATOR = "spiffe://sluice/operator"


class Authority:
    """Issues certificates into a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.folder.mkdir(parents=True, exist_ok=True)
        self.ca = trustme.CA()
        self.file = folder / "ca.pem"
        self.ca.cert_pem.write_to_path(self.file)

    def issue(
        self,
        name: str,
        *uris: str,
        expired: bool = False,
        named: bool = True,
        lasts: timedelta = timedelta(days=9),
        hosts: Sequence[str] = (),
    ) -> TlsSettings:
        """Makes a certificate of this authority and replaces an earlier one; returns the settings of its holder, who
        trusts the authority.

        Args:
            uris: alternative names that say who calls; by default an operator, who may call everything.
            named: False for none.
            lasts: until it expires.
            hosts: more addresses of its holder.
        """
        now = datetime.now(UTC)
        starts, ends = (now - timedelta(days=2), now - timedelta(hours=1)) if expired else (now, now + lasts)
        key = ec.generate_private_key(ec.SECP256R1())
        names: list[x509.GeneralName] = [
            x509.DNSName("localhost"),
            *(x509.IPAddress(ipaddress.ip_address(host)) for host in dict.fromkeys(("127.0.0.1", *hosts))),
            x509.DNSName(f"{name}.test"),
            *(map(x509.UniformResourceIdentifier, uris or (OPERATOR,)) if named else ()),
        ]
        authority = x509.load_pem_x509_certificate(self.ca.cert_pem.bytes())
        authority_key = load_pem_private_key(self.ca.private_key_pem.bytes(), None)
        assert isinstance(authority_key, ec.EllipticCurvePrivateKey)
        made = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([]))
            .issuer_name(authority.subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(starts - timedelta(minutes=1))
            .not_valid_after(ends)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName(names), critical=True)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), critical=False
            )
            .sign(authority_key, SHA256())
        )
        certificate, key_file = self.folder / f"{name}.pem", self.folder / f"{name}.key"
        private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        # The certificate first: until the key is there as well the two do not fit, and no reader may fail.
        for path, content in ((certificate, made.public_bytes(Encoding.PEM)), (key_file, private)):
            fresh = path.with_suffix(".fresh")
            fresh.write_bytes(content)
            os.replace(fresh, path)
        return TlsSettings(tls_cert=certificate, tls_key=key_file, tls_ca=self.file)
