"""`sluice certs`: an authority for development and a certificate for each service, in one folder."""

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
from sluice.cli.private_files import write
from sluice.cli.up.tls import AUTHORITY, SERVICES, TRUST_DOMAIN

NAMES = (*SERVICES, "redis", "client")
LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")
_IDENTITIES = {**{name: name for name in CALLERS}, "client": OPERATOR}
_TRUST_DOMAIN = re.compile(r"[a-z0-9._-]+")
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]*")
_HOST_NAME = re.compile(r"(\*\.)?[A-Za-z0-9_]([A-Za-z0-9_.-]{0,250}[A-Za-z0-9_.])?")
CLOCKS_DIFFER = timedelta(minutes=5)
LONGEST_COMMON_NAME = 64  # of X.509


class BadFolder(Exception):
    """The certificates cannot be made; the text is one sentence."""


@dataclass(frozen=True)
class Options:
    """What to make: certificates of `names`, and one for each of `workers` alone, for these hosts too.

    They are valid for so many days; `renew` replaces those that are there, never the authority. Those of callers name
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
class _Wanted:
    """One certificate: the name of its files, its host names, and the caller that it names, if any."""

    name: str
    hosts: Sequence[str]
    identity: str


@dataclass(frozen=True)
class _Authority:
    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey


def make(folder: Path, options: Options) -> list[str]:
    """Makes what is missing, and with `renew` every certificate anew; a sentence about each thing made.

    Raises:
        BadFolder: a file cannot be read or written, or the authority there is none.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return _make(folder, options)
    except OSError as error:
        raise BadFolder(f"{error.filename or folder}: {error.strerror}.") from error


def _make(folder: Path, options: Options) -> list[str]:
    wanted = [
        *(_of_service(name, options) for name in options.names),
        *(_of_worker(one, options) for one in options.workers),
    ]
    if not _TRUST_DOMAIN.fullmatch(options.trust_domain):
        raise BadFolder(f"--trust-domain {options.trust_domain!r} must be of a-z, 0-9, '.', '-' and '_'.")
    said = []
    there = (folder / f"{AUTHORITY}.pem").exists(), (folder / f"{AUTHORITY}.key").exists()
    if there == (True, False):
        raise BadFolder(f"{folder} has {AUTHORITY}.pem without {AUTHORITY}.key: nothing can be issued with it.")
    if there == (False, True):  # a new authority would be written over it
        raise BadFolder(f"{folder} has {AUTHORITY}.key without {AUTHORITY}.pem: put its certificate back, or move it.")
    if not all(there):
        _write_authority(folder, options.authority_days)
        said.append(f"made {folder / AUTHORITY}.pem, the authority; keep {AUTHORITY}.key where no service runs")
    authority = _read_authority(folder)
    for one in wanted:
        path = folder / f"{one.name}.pem"
        known = path.exists() and path.with_name(f"{one.name}.key").exists()
        if known and not options.renew:
            said.append(f"left {path} as it is; --renew replaces it")
            continue
        ends = _issue(folder, authority, one, options)
        shown = f", for {one.identity}" if one.identity else ""
        said.append(f"{'renewed' if known else 'made'} {path}{shown}, valid until {ends:%Y-%m-%d %H:%M} UTC")
    return said


def _of_service(name: str, options: Options) -> _Wanted:
    identity = _IDENTITIES.get(name)
    return _Wanted(_file_name(name), (name,), "" if identity is None else f"spiffe://{options.trust_domain}/{identity}")


def _of_worker(worker_id: str, options: Options) -> _Wanted:
    name = _file_name(f"{WORKER}-{worker_id}")
    return _Wanted(name, (WORKER, worker_id), f"spiffe://{options.trust_domain}/{WORKER}/{worker_id}")


def _file_name(name: str) -> str:
    if not _FILE_NAME.fullmatch(name) or name == AUTHORITY:
        raise BadFolder(f"{name!r} cannot be the name of a certificate: letters, digits, '-' and '.' can.")
    return name


def _write_authority(folder: Path, days: int) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Sluice development authority")])
    usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)  # certificates and their lists
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
        read = _Authority(
            x509.load_pem_x509_certificate(certificate.read_bytes()),
            _elliptic(load_pem_private_key(key.read_bytes(), None)),
        )
    except (ValueError, TypeError) as error:
        raise BadFolder(f"{certificate} and {key} are no authority that `sluice certs` made.") from error
    if read.certificate.public_key() != read.key.public_key():
        raise BadFolder(f"{key} is not the key of {certificate}.")
    return read


def _elliptic(key: object) -> ec.EllipticCurvePrivateKey:
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ValueError("another kind of key")
    return key


def _issue(folder: Path, authority: _Authority, wanted: _Wanted, options: Options) -> datetime:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, wanted.name[:LONGEST_COMMON_NAME])])
    names = [_general(host) for host in dict.fromkeys((*wanted.hosts, *LOCAL_NAMES, *options.hosts))]
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
        .not_valid_before(now - CLOCKS_DIFFER)
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _general(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    if not _HOST_NAME.fullmatch(host):
        raise BadFolder(f"--host {host!r} is no address and no name in ASCII form; each one has a --host of its own.")
    return x509.DNSName(host)


def _write_pair(folder: Path, name: str, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
    # One after the other: a service that looks in between sees that they do not fit, and looks again.
    write(folder / f"{name}.pem", certificate.public_bytes(Encoding.PEM))
    write(folder / f"{name}.key", key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
