"""What the doctor looks at in certificates: those in the folder of --tls, and the one that the gateway shows."""

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
REACH_S = 3.0


def examine(place: Endpoint) -> list[Finding]:
    """Reads files and shakes hands; blocks."""
    folder = place.trust.folder
    found = [] if folder is None else list(_folder(folder))
    parts = urlsplit(place.gateway)
    if parts.scheme == "https" and parts.hostname:
        found.append(shown("certificate of the gateway", parts.hostname, parts.port or 443, place))
    return found or [skipped("certificates", "Nothing is encrypted here: --tls DIR and an https gateway are checked.")]


def _folder(folder: Path) -> Iterator[Finding]:
    for file in sorted(folder.glob("*.pem")):
        try:
            certificates = x509.load_pem_x509_certificates(file.read_bytes())
        except (OSError, ValueError):
            yield fail(
                f"certificate {file.name}", "cannot be read as PEM", f"Make it again: sluice certs {folder} --renew."
            )
            continue
        yield judged(f"certificate {file.name}", certificates[0], f"sluice certs {folder} --renew")


def shown(check: str, host: str, port: int, place: Endpoint, grpc: bool = False) -> Finding:
    """The certificate that a server shows; of a gRPC server the name was checked by the call before."""
    context = place.trust.context()
    if grpc:
        context.set_alpn_protocols(["h2"])
        context.check_hostname = False
    try:
        with (
            socket.create_connection((host, port), REACH_S) as plain,
            context.wrap_socket(plain, server_hostname=host) as secured,
        ):
            certificate = secured.getpeercert(binary_form=True)
    except ssl.SSLCertVerificationError as error:
        advice = "Give the authority with --tls, and the certificate the name that clients use."
        return fail(check, f"is not accepted: {error.verify_message}", advice)
    except OSError as error:
        if grpc:
            return skipped(check, f"It cannot be seen from here: {error}.")
        return fail(check, f"cannot be seen: {error}", "Does the gateway speak HTTPS at this address?")
    assert certificate is not None
    renew = "Renew --tls-cert" if grpc else "Renew --https-cert"
    return judged(check, x509.load_der_x509_certificate(certificate), renew)


def judged(check: str, certificate: x509.Certificate, renew: str) -> Finding:
    """How long a certificate is still valid."""
    now, until = datetime.now(UTC), certificate.not_valid_after_utc
    if certificate.not_valid_before_utc > now:
        return fail(check, f"is valid from {certificate.not_valid_before_utc:%Y-%m-%d} only", "Is the clock right?")
    if until <= now:
        return fail(check, f"expired on {until:%Y-%m-%d}", f"{renew}; running services take the new file.")
    left = f"valid for {(until - now).days} days"
    return warn(check, left, f"{renew} soon.") if until - now < SOON else ok(check, left)
