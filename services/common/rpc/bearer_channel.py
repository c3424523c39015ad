"""Channels that send a bearer token with every call, also over plain text, where gRPC's call credentials refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc

_Call = Callable[..., Any]


class BearerChannel(grpc.aio.Channel):
    """Wraps a channel.

    Args:
        token: returns the token, empty for none; called for every call, so that tokens can rotate.
    """

    def __init__(self, channel: grpc.aio.Channel, token: Callable[[], str]) -> None:
        self._channel = channel
        self._token = token

    def _authenticated(self, call: _Call) -> Any:
        def with_token(*args: Any, metadata: Any = None, **kwargs: Any) -> Any:
            token = self._token()
            authorization = (("authorization", f"Bearer {token}"),) if token else ()
            return call(*args, metadata=(*(metadata or ()), *authorization), **kwargs)

        return with_token

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:
        return self._authenticated(self._channel.unary_unary(*args, **kwargs))

    def unary_stream(self, *args: Any, **kwargs: Any) -> Any:
        return self._authenticated(self._channel.unary_stream(*args, **kwargs))

    def stream_unary(self, *args: Any, **kwargs: Any) -> Any:
        return self._authenticated(self._channel.stream_unary(*args, **kwargs))

    def stream_stream(self, *args: Any, **kwargs: Any) -> Any:
        return self._authenticated(self._channel.stream_stream(*args, **kwargs))

    async def __aenter__(self) -> BearerChannel:
        return self

    async def __aexit__(self, *exc_info: Any) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        await self._channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._channel.channel_ready()
