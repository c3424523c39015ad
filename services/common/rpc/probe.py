"""Checks whether a service is ready: `python -m services.common.rpc.probe 127.0.0.1:50051`.

For container health checks. Exits with 0 when gRPC health reports SERVING, or an http:// address responds with 2xx,
within three seconds; otherwise with 1 and one sentence on standard error.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from services.common.base.errors import SluiceError

if TYPE_CHECKING:
    import ssl

    import grpc

TIMEOUT_S = 3.0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one probe; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m services.common.rpc.probe", description=__doc__)
    parser.add_argument("address", help="host:port of a gRPC service, or a URL that responds with 2xx when ready")
    parser.add_argument(
        "--service",
        default="",
        help="read this service's SLUICE_<SERVICE>_TLS_* or _HTTPS_* variables; default: plain text",
    )
    parser.add_argument(
        "--server-name", default="", help="expected name in the service's certificate; default: the value of --service"
    )
    parser.add_argument(
        "--live", action="store_true", help="check only that the gRPC service responds, not that it accepts requests"
    )
    arguments = parser.parse_args(argv)
    if arguments.address.startswith(("http://", "https://")):
        problem = probe_http(arguments.address, arguments.service)
    else:
        name = arguments.server_name or arguments.service
        problem = probe_grpc(arguments.address, arguments.service, name, "live" if arguments.live else "")
    if problem:
        print(f"probe: {arguments.address} {problem}", file=sys.stderr)
    return 1 if problem else 0


def probe_http(url: str, service: str = "") -> str:
    """Returns why `url` is not ready; empty when it is.

    Args:
        service: whose HTTPS variables apply to an https:// address; empty: the system's trust store.
    """
    # Imported here: gRPC probes, which run every second, would pay for it.
    import http.client
    import urllib.error
    import urllib.request

    # Ignore proxies from the environment: the probed port is local.
    handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
    try:
        if (context := _https_context(service)) is not None:
            handlers.append(urllib.request.HTTPSHandler(context=context))
        opener = urllib.request.build_opener(*handlers)
        with opener.open(url, timeout=TIMEOUT_S):
            return ""
    except urllib.error.HTTPError as error:
        return f"responded with {error.code}"
    except (OSError, ValueError, http.client.HTTPException) as error:
        return "cannot be reached: " + " ".join(str(getattr(error, "reason", error)).split())


def _https_context(service: str) -> ssl.SSLContext | None:
    """Returns a context that presents and accepts exactly the service's certificate, whatever its host name."""
    certificate = os.environ.get(f"SLUICE_{service.upper()}_HTTPS_CERT", "")
    if not certificate:
        return None
    import ssl

    context = ssl.create_default_context(cafile=certificate)
    context.check_hostname = False
    context.verify_flags |= ssl.VerifyFlags.VERIFY_X509_PARTIAL_CHAIN
    context.load_cert_chain(certificate, os.environ.get(f"SLUICE_{service.upper()}_HTTPS_KEY"), password=lambda: "")
    return context


def probe_grpc(address: str, service: str, server_name: str, checked: str = "") -> str:
    """Returns why the gRPC service at `address` is not ready; empty when it is.

    Args:
        address: host:port.
        service: whose TLS variables apply; empty for plain text.
        server_name: expected name in its certificate; used only with TLS.
        checked: service name in the health request; empty for the entire server.
    """
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    try:
        opened_channel = _open_channel(address, service, server_name)
    except SluiceError as error:
        return f"cannot be probed: {error.message}"
    with opened_channel as channel:
        health = health_pb2_grpc.HealthStub(channel)
        try:
            answer = health.Check(health_pb2.HealthCheckRequest(service=checked), timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            return f"cannot be reached: {error.code().name}" if isinstance(error, grpc.Call) else "cannot be reached"
    if answer.status == health_pb2.HealthCheckResponse.SERVING:
        return ""
    return f"is {health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)}"


def _open_channel(address: str, service: str, server_name: str) -> grpc.Channel:
    import grpc

    options: list[tuple[str, str | int]] = [("grpc.enable_http_proxy", 0)]
    credentials = _credentials(service) if service else None
    if credentials is None:
        return grpc.insecure_channel(address, options=options)
    return grpc.secure_channel(address, credentials, options=[*options, ("grpc.ssl_target_name_override", server_name)])


def _credentials(service: str) -> grpc.ChannelCredentials | None:
    prefix = f"SLUICE_{service.upper()}_"
    if not os.environ.get(f"{prefix}TLS_CERT"):
        return None
    # Imported only with TLS: loading settings costs more than the probe itself.
    from services.common.security.tls import channel_credentials
    from services.common.settings.service import TlsSettings

    settings = TlsSettings(_env_prefix=prefix)
    # Without a CA, the service must present its own certificate.
    return channel_credentials(settings.model_copy(update={"tls_ca": settings.tls_ca or settings.tls_cert}))


if __name__ == "__main__":
    raise SystemExit(main())
