"""Channels to other services: message limits, keepalive, TLS and tokens the same everywhere."""

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
        credentials: None for plain text; PeerCredentials may bring tokens, and certificates that rotate.
        server_name: name the certificate must carry when `address` is an IP that a name resolved to.
        callee: the service behind the address, such as ``router`` or ``worker/w1``: each call shows the token for it.
            Empty: no token is shown.
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
        # One channel is one replica: shared subchannels would hide which connection broke.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_retries", 0),
        ("grpc.enable_http_proxy", 0),
    ]
    shown = credentials if isinstance(credentials, PeerCredentials) else PeerCredentials(None)
    if shown.ip_name and _is_ip(server_name or address.rpartition(":")[0]):
        server_name = shown.ip_name

    def connect(credentials: grpc.ChannelCredentials) -> grpc.aio.Channel:
        named = [("grpc.ssl_target_name_override", server_name)] if server_name else []
        return grpc.aio.secure_channel(address, credentials, options=[*options, *named])

    channel: grpc.aio.Channel
    if shown.tls is not None:
        channel = RenewingChannel(address, shown.tls, connect)
    elif credentials is None or credentials is shown:
        channel = grpc.aio.insecure_channel(address, options=options)
    else:
        channel = connect(credentials)
    if shown.tokens is None or not callee:
        return channel
    return BearerChannel(channel, partial(shown.tokens, callee))


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True
