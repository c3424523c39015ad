"""A client of Responses over WebSocket."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from websockets.sync.client import ClientConnection, connect

LAST = ("error", "response.completed", "response.failed", "response.incomplete")


class ResponseSocket:
    """One connection.

    Args:
        model: the model of every turn.
    """

    def __init__(self, connection: ClientConnection, model: str) -> None:
        self.connection = connection
        self._model = model

    def send(self, **fields: Any) -> None:
        """Sends the event response.create."""
        self.connection.send(json.dumps({"type": "response.create", "model": self._model, **fields}))

    def event(self) -> dict[str, Any]:
        """Returns the next event."""
        found: dict[str, Any] = json.loads(self.connection.recv(timeout=60))
        return found

    def events(self) -> list[dict[str, Any]]:
        """Returns the events up to the last one of a turn."""
        found = [self.event()]
        while found[-1]["type"] not in LAST:
            found.append(self.event())
        return found

    def turn(self, **fields: Any) -> list[dict[str, Any]]:
        """Sends the event response.create and returns the events of its turn."""
        self.send(**fields)
        return self.events()


@contextmanager
def response_socket(url: str, model: str = "tekken", **headers: str) -> Iterator[ResponseSocket]:
    """Opens a connection to the gateway at an http:// address."""
    address = url.replace("http", "ws", 1) + "/v1/responses"
    with connect(address, additional_headers=headers, max_size=None, open_timeout=30, compression=None) as made:
        yield ResponseSocket(made, model)
