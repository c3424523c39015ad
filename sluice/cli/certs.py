"""`sluice certs`: creates a development authority and a certificate for each service, in one folder."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from services.common.security.identity import CALLERS, OPERATOR, WORKER
from sluice.cli.errors import BadFlag
from sluice.cli.private_files import write
from sluice.cli.up.tls import AUTHORITY, SERVICES, TRUST_DOMAIN

NAMES = (*SERVICES, "redis", "client")
LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")
_IDENTITIES = {**{name: name for name in CALLERS}, "client": OPERATOR}
_TRUST_DOMAIN = re.compile(r"[a-z0-9._-]+")
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]*")
_HOST_NAME = re.compile(r"(\*\.)?[A-Za-z0-9_]([A-Za-z0-9_.-]{0,250}[A-Za-z0-9_.])?")
CLOCK_SKEW = timedelta(minutes=5)
MAX_COMMON_NAME = 64
"""Characters of the common name of a certificate, as in X.509; the rest is left out."""


@dataclass(frozen=True)
class Options:
    """Selects the certificates to create: those of `names`, and a separate one for each of `workers`.

    All are also valid for `hosts`. `renew` replaces existing certificates, never the authority. Those of callers name
    them in `trust_domain`.
    """

    names: Sequence[str] = NAMES
    workers: Sequence[str] = ()
    hosts: Sequence[str] = ()
    days: int = 90
    authority_days: int = 3650
    renew: bool = False
    trust_domain: str = TRUST_DOMAIN


@dataclass(frozen=True)
class _CertificateRequest:
    """Describes one certificate: the name of its files, its host names, and the caller that it names, if any."""

    name: str
    hosts: Sequence[str]
    identity: str


@dataclass(frozen=True)
class _Authority:
    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey


def make(folder: Path, options: Options) -> list[str]:
    """Creates missing files, and with `renew` every certificate again; returns a sentence about each.

    Raises:
        BadFlag: a file cannot be read or written, or the existing authority is invalid.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return _make(folder, options)
    except OSError as error:
        raise BadFlag(f"{error.filename or folder}: {error.strerror}.") from error


def _make(folder: Path, options: Options) -> list[str]:
    wanted = [
        *(_of_service(name, options) for name in options.names),
        *(_of_worker(one, options) for one in options.workers),
    ]
    if not _TRUST_DOMAIN.fullmatch(options.trust_domain):
        raise BadFlag(f"--trust-domain {options.trust_domain!r} may contain only a-z, 0-9, '.', '-' and '_'.")
    lines = []
    existing = (folder / f"{AUTHORITY}.pem").exists(), (folder / f"{AUTHORITY}.key").exists()
    if existing == (True, False):
        raise BadFlag(f"{folder} has {AUTHORITY}.pem without {AUTHORITY}.key: restore the key, or use another folder.")
    if existing == (False, True):  # creating an authority would overwrite it
        raise BadFlag(
            f"{folder} has {AUTHORITY}.key without {AUTHORITY}.pem: restore the certificate, or move the key away."
        )
    if not all(existing):
        _write_authority(folder, options.authority_days)
        lines.append(f"created {folder / AUTHORITY}.pem, the authority; keep {AUTHORITY}.key where no service runs")
    authority = _read_authority(folder)
    for one in wanted:
        path = folder / f"{one.name}.pem"
        exists = path.exists() and path.with_name(f"{one.name}.key").exists()
        if exists and not options.renew:
            lines.append(f"kept {path}; --renew replaces it")
            continue
        expiry = _issue(folder, authority, one, options)
        caller = f", for {one.identity}" if one.identity else ""
        lines.append(f"{'renewed' if exists else 'created'} {path}{caller}, valid until {expiry:%Y-%m-%d %H:%M} UTC")
    return lines


def _of_service(name: str, options: Options) -> _CertificateRequest:
    identity = _IDENTITIES.get(name)
    return _CertificateRequest(
        _file_name(name), (name,), "" if identity is None else f"spiffe://{options.trust_domain}/{identity}"
    )


def _of_worker(worker_id: str, options: Options) -> _CertificateRequest:
    name = _file_name(f"{WORKER}-{worker_id}")
    return _CertificateRequest(name, (WORKER, worker_id), f"spiffe://{options.trust_domain}/{WORKER}/{worker_id}")


def _file_name(name: str) -> str:
    if not _FILE_NAME.fullmatch(name) or name == AUTHORITY:
        raise BadFlag(f"{name!r} cannot be the name of a certificate; use letters, digits, '-' and '.'.")
    return name


def _write_authority(folder: Path, days: int) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Sluice development authority")])
    usage = x509.KeyUsage(
        False, False, False, False, False, True, True, False, False
    )  # signs certificates and revocation lists
    certificate = (
        _builder(name, name, key, days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .sign(key, SHA256())
    )
    _write_pair(folder, AUTHORITY, certificate, key)


def _read_authority(folder: Path) -> _Authority:
    certificate, key = folder / f"{AUTHORITY}.pem", folder / f"{AUTHORITY}.key"
    try:
        authority = _Authority(
            x509.load_pem_x509_certificate(certificate.read_bytes()),
            _elliptic(load_pem_private_key(key.read_bytes(), None)),
        )
    except (ValueError, TypeError) as error:
        raise BadFlag(
            f"{certificate} and {key} are not an authority created by `sluice certs`; use another folder."
        ) from error
    if authority.certificate.public_key() != authority.key.public_key():
        raise BadFlag(f"{key} is not the key of {certificate}; restore the matching pair.")
    return authority


def _elliptic(key: object) -> ec.EllipticCurvePrivateKey:
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ValueError("not an elliptic-curve key")
    return key


def _issue(folder: Path, authority: _Authority, wanted: _CertificateRequest, options: Options) -> datetime:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, wanted.name[:MAX_COMMON_NAME])])
    names = [_general_name(host) for host in dict.fromkeys((*wanted.hosts, *LOCAL_NAMES, *options.hosts))]
    if wanted.identity:
        names.append(x509.UniformResourceIdentifier(wanted.identity))
    purposes = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key())
    certificate = (
        _builder(subject, authority.certificate.subject, key, options.days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
        .add_extension(issuer, critical=False)
        .sign(authority.key, SHA256())
    )
    _write_pair(folder, wanted.name, certificate, key)
    return certificate.not_valid_after_utc


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SKEW)
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    if not _HOST_NAME.fullmatch(host):
        raise BadFlag(f"--host {host!r} is not an address or an ASCII host name; pass each one in a separate --host.")
    return x509.DNSName(host)


def _write_pair(folder: Path, name: str, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
    # Not atomic as a pair: a service that reads in between detects the mismatch and reads again.
    write(folder / f"{name}.pem", certificate.public_bytes(Encoding.PEM))
    write(folder / f"{name}.key", key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
