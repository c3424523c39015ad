"""Opens channels to other services, with the same message limits, keepalive, TLS and tokens everywhere."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from functools import partial

import grpc

from services.common.rpc.bearer_channel import BearerChannel
from services.common.rpc.rotating_channel import RenewingChannel
from services.common.security.tls import PeerCredentials

KEEPALIVE_MS = 8_000
"""A connection with calls on which nothing is received for this long is pinged, by clients and servers."""
PING_TIMEOUT_MS = 5_000
"""A connection on which a ping is not acknowledged for this long is lost; gRPC's threads acknowledge pings, so that a
process whose event loop is blocked does so."""
FOREIGN_KEEPALIVE_MS = 310_000
"""Of servers with gRPC's default policy, which end the connection of a client that pings more often than every 300 s
while they have nothing to send."""
MIN_PING_INTERVAL_MS = 5_000
"""Milliseconds between pings that servers of the suite permit, and workers advertise."""
CONNECT_ATTEMPT_MS = 5_000
"""How long a server may take to answer an attempt to connect, before it begins anew. If attempts ended sooner, a server
with many clients that return would get several attempts from each, and could finish none."""
MAX_MESSAGE_BYTES = 64 << 20
"""Bytes of a message that a client of the suite sends or receives; a call with a longer one fails."""
READ_AHEAD_BYTES = 1 << 20
"""What gRPC holds of a stream that is not being read, where it is bounded; enough for 20 MB/s over 50 ms."""

KEEPALIVE_OPTIONS: Sequence[tuple[str, int]] = (
    ("grpc.keepalive_timeout_ms", PING_TIMEOUT_MS),
    # Without this, gRPC waits a minute for the acknowledgement, whatever the keepalive's timeout.
    ("grpc.http2.ping_timeout_ms", PING_TIMEOUT_MS),
)


def keepalive_ms_of(min_ping_interval_ms: int) -> int:
    """Returns how often a server may be pinged that advertises this interval; 0: it advertises none."""
    wanted_ms = min_ping_interval_ms or FOREIGN_KEEPALIVE_MS
    return min(max(wanted_ms, KEEPALIVE_MS), FOREIGN_KEEPALIVE_MS)


def open_channel(
    address: str,
    credentials: grpc.ChannelCredentials | None = None,
    server_name: str = "",
    callee: str = "",
    keepalive_ms: int = KEEPALIVE_MS,
    *,
    bounds_read_ahead: bool = False,
) -> grpc.aio.Channel:
    """Opens a channel to one replica.

    Args:
        address: host:port.
        credentials: None for plain text; PeerCredentials may add tokens and rotating certificates.
        server_name: name expected in the certificate when `address` is an IP that a name resolved to.
        callee: the service at the address, such as ``router`` or ``worker/w1``, which selects the token sent with each
            call. Empty: no token is sent.
        keepalive_ms: how long a connection with calls may be silent before it is pinged; `FOREIGN_KEEPALIVE_MS` for
            servers that may not permit more.
        bounds_read_ahead: whether gRPC reads at most READ_AHEAD_BYTES and a message ahead of each stream; otherwise it
            reads what the connection can deliver in a round trip, up to tens of MiB.
    """
    options: list[tuple[str, str | int]] = [
        ("grpc.keepalive_time_ms", keepalive_ms),
        *KEEPALIVE_OPTIONS,
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", CONNECT_ATTEMPT_MS),
        ("grpc.max_reconnect_backoff_ms", 2_000),
        # One channel per replica: shared subchannels would hide which connection failed.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_retries", 0),
        ("grpc.enable_http_proxy", 0),
    ]
    if bounds_read_ahead:
        options += [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", READ_AHEAD_BYTES)]
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
