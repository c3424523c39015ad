"""`sluice certs`: an authority for development and a certificate for each service, in one folder."""

from __future__ import annotations

import ipaddress
import os
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

from sluice.cli.secured import AUTHORITY, SERVICES

NAMES = (*SERVICES, "redis", "client")
LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]*")
_HOST_NAME = re.compile(r"(\*\.)?[A-Za-z0-9_]([A-Za-z0-9_.-]{0,250}[A-Za-z0-9_.])?")
CLOCKS_DIFFER = timedelta(minutes=5)


class BadFolder(Exception):
    """The certificates cannot be made; the text is one sentence."""


@dataclass(frozen=True)
class Options:
    """What to make: certificates of `names` for these hosts too, valid for so many days; `renew` replaces those that
    are there, never the authority."""

    names: Sequence[str] = NAMES
    hosts: Sequence[str] = ()
    days: int = 90
    authority_days: int = 3650
    renew: bool = False


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
    for name in options.names:
        if not _FILE_NAME.fullmatch(name) or name == AUTHORITY:
            raise BadFolder(f"{name!r} cannot be the name of a certificate: letters, digits, '-' and '.' can.")
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
    for name in options.names:
        known = (folder / f"{name}.pem").exists() and (folder / f"{name}.key").exists()
        if known and not options.renew:
            said.append(f"left {folder / name}.pem as it is; --renew replaces it")
            continue
        ends = _issue(folder, authority, name, options)
        said.append(f"{'renewed' if known else 'made'} {folder / name}.pem, valid until {ends:%Y-%m-%d %H:%M} UTC")
    return said


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


def _issue(folder: Path, authority: _Authority, name: str, options: Options) -> datetime:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    hosts = dict.fromkeys((name, *LOCAL_NAMES, *options.hosts))
    purposes = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key())
    certificate = (
        _builder(subject, authority.certificate.subject, key, options.days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([_general(host) for host in hosts]), critical=False)
        .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
        .add_extension(issuer, critical=False)
        .sign(authority.key, SHA256())
    )
    _write_pair(folder, name, certificate, key)
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
    _write(folder / f"{name}.pem", certificate.public_bytes(Encoding.PEM))
    _write(folder / f"{name}.key", key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))


def _write(path: Path, content: bytes) -> None:
    """In one step, and readable by the owner alone from the first moment."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    opened = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(opened, "wb") as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(content)
    os.replace(fresh, path)
