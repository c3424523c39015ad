"""Checks certificates: those in the folder of --tls, and those that servers present."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import urlsplit

from cryptography import x509

from sluice.cli.doctor.finding import Finding, fail, ok, skipped, warn
from sluice.cli.live.endpoint import Endpoint

SOON = timedelta(days=14)
CONNECT_TIMEOUT_S = 3.0


def examine(endpoint: Endpoint) -> list[Finding]:
    """Checks certificate files and the gateway's certificate; blocks."""
    folder = endpoint.trust.folder
    found = [] if folder is None else list(_folder(folder))
    parts = urlsplit(endpoint.gateway)
    if parts.scheme == "https" and parts.hostname:
        found.append(presented("certificate of the gateway", parts.hostname, parts.port or 443, endpoint))
    return found or [
        skipped("certificates", "Nothing is encrypted; pass --tls DIR or an https gateway to check certificates.")
    ]


def _folder(folder: Path) -> Iterator[Finding]:
    for file in sorted(folder.glob("*.pem")):
        try:
            certificates = x509.load_pem_x509_certificates(file.read_bytes())
        except (OSError, ValueError):
            yield fail(
                f"certificate {file.name}", "cannot be read as PEM", f"Create it again: sluice certs {folder} --renew."
            )
            continue
        yield validity(f"certificate {file.name}", certificates[0], f"sluice certs {folder} --renew")


def presented(check: str, host: str, port: int, endpoint: Endpoint, grpc: bool = False) -> Finding:
    """Checks the certificate that a server presents; for gRPC, the previous call has verified the name."""
    context = endpoint.trust.context()
    if grpc:
        context.set_alpn_protocols(["h2"])
        context.check_hostname = False
    try:
        with (
            socket.create_connection((host, port), CONNECT_TIMEOUT_S) as plain,
            context.wrap_socket(plain, server_hostname=host) as secured,
        ):
            certificate = secured.getpeercert(binary_form=True)
    except ssl.SSLCertVerificationError as error:
        advice = "Pass the authority with --tls; the certificate must have the host name that clients use."
        return fail(check, f"is rejected: {error.verify_message}", advice)
    except OSError as error:
        if grpc:
            return skipped(check, f"It cannot be read from this machine: {error}.")
        return fail(check, f"cannot be read: {error}", "Check that the gateway serves HTTPS at this address.")
    assert certificate is not None
    renew = "Renew --tls-cert" if grpc else "Renew --https-cert"
    return validity(check, x509.load_der_x509_certificate(certificate), renew)


def validity(check: str, certificate: x509.Certificate, renew: str) -> Finding:
    """Checks the validity period of a certificate."""
    now, until = datetime.now(UTC), certificate.not_valid_after_utc
    if certificate.not_valid_before_utc > now:
        return fail(check, f"is not valid before {certificate.not_valid_before_utc:%Y-%m-%d}", "Check the clock.")
    if until <= now:
        return fail(check, f"expired on {until:%Y-%m-%d}", f"{renew}; running services load the new file.")
    left = f"valid for {(until - now).days} days"
    return warn(check, left, f"{renew} soon.") if until - now < SOON else ok(check, left)
