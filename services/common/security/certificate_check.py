"""Why peers would refuse a certificate, found by shaking hands with oneself: the ssl module shows no dates itself."""

from __future__ import annotations

import ssl
from pathlib import Path

_FLIGHTS = 4
"""More than a handshake has."""


def refusal(server: ssl.SSLContext, certificate: Path) -> str:
    """OpenSSL's words, such as "certificate has expired"; empty when a peer that trusts the certificate takes it.

    Args:
        server: holds the certificate and its key, and asks its peers for none.
        certificate: the same, for the peer to trust.
    """
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VerifyFlags.VERIFY_X509_PARTIAL_CHAIN
    client.load_verify_locations(certificate)
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (client.wrap_bio(back, there), server.wrap_bio(there, back, server_side=True))
    for end in ends * _FLIGHTS:
        try:
            end.do_handshake()
        except ssl.SSLWantReadError:
            continue
        except ssl.SSLCertVerificationError as error:
            return error.verify_message
        except ssl.SSLError as error:
            return error.reason
    return ""
