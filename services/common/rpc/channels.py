"""Opens channels to other services, with the same message limits, keepalive, TLS and tokens everywhere."""

from __future__ import annotations

import ipaddress
from functools import partial

import grpc

from services.common.rpc.bearer_channel import BearerChannel
from services.common.rpc.rotating_channel import RenewingChannel
from services.common.security.tls import PeerCredentials

KEEPALIVE_MS = 10_000
KEEPALIVE_TIMEOUT_MS = 5_000
MAX_MESSAGE_BYTES = 64 << 20


def open_channel(
    address: str,
    credentials: grpc.ChannelCredentials | None = None,
    server_name: str = "",
    callee: str = "",
) -> grpc.aio.Channel:
    """Opens a channel to one replica.

    Args:
        address: host:port.
        credentials: None for plain text; PeerCredentials may add tokens and rotating certificates.
        server_name: name expected in the certificate when `address` is an IP that a name resolved to.
        callee: the service at the address, such as ``router`` or ``worker/w1``, which selects the token sent with each
            call. Empty: no token is sent.
    """
    options: list[tuple[str, str | int]] = [
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 2_000),
        # One channel per replica: shared subchannels would hide which connection failed.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_retries", 0),
        ("grpc.enable_http_proxy", 0),
    ]
    peer = credentials if isinstance(credentials, PeerCredentials) else PeerCredentials(None)
    if peer.ip_name and _is_ip(server_name or address.rpartition(":")[0]):
        server_name = peer.ip_name

    def connect(credentials: grpc.ChannelCredentials) -> grpc.aio.Channel:
        target_name = [("grpc.ssl_target_name_override", server_name)] if server_name else []
        return grpc.aio.secure_channel(address, credentials, options=[*options, *target_name])

    channel: grpc.aio.Channel
    if peer.tls is not None:
        channel = RenewingChannel(address, peer.tls, connect)
    elif credentials is None or credentials is peer:
        channel = grpc.aio.insecure_channel(address, options=options)
    else:
        channel = connect(credentials)
    if peer.tokens is None or not callee:
        return channel
    return BearerChannel(channel, partial(peer.tokens, callee))


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True
