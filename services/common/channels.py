"""Channels to other services: message limits, keepalive and TLS the same everywhere."""

from __future__ import annotations

from collections.abc import Callable

import grpc

from services.common.bearer import BearerChannel

KEEPALIVE_MS = 10_000
KEEPALIVE_TIMEOUT_MS = 5_000
MAX_MESSAGE_BYTES = 64 << 20


def open_channel(
    address: str,
    credentials: grpc.ChannelCredentials | None = None,
    server_name: str = "",
    token: Callable[[], str] | None = None,
) -> grpc.aio.Channel:
    """Opens a channel to one replica.

    Args:
        address: host:port.
        credentials: None for plain text.
        server_name: name the certificate must carry when `address` is an IP that a name resolved to.
        token: gives the bearer token that every call shows; None shows none.
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
    if credentials is None:
        channel = grpc.aio.insecure_channel(address, options=options)
    else:
        if server_name:
            options.append(("grpc.ssl_target_name_override", server_name))
        channel = grpc.aio.secure_channel(address, credentials, options=options)
    return channel if token is None else BearerChannel(channel, token)
