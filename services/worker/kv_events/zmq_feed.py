"""Receives KV events from the ZMQ publishers of vLLM and SGLang."""

from __future__ import annotations

import asyncio
import logging
import sys
from typing import TYPE_CHECKING, Any

from services.common.base.errors import ErrorKind, SluiceError
from services.worker.kv_events.event_sequencer import EventSequencer
from services.worker.kv_events.events import EngineBatch, MalformedEvents
from services.worker.kv_events.wire import decode

if TYPE_CHECKING:
    from zmq.asyncio import Context, Socket

log = logging.getLogger(__name__)

END_OF_REPLAY = b"\xff" * 8
QUEUED_MESSAGES = 100_000
MAX_MESSAGE_BYTES = 64 << 20
"""Bytes of one message with KV events of an engine; the connection of a longer one is closed."""
MESSAGES_PER_TURN = 64
IDLE_S = 10.0
REPLAY_TIMEOUT_S = 5.0


class ZmqFeed:
    """Passes one rank's events to its sequencer and requests the replays it needs.

    Events published during a replay wait in the socket, so they are processed after it.

    Args:
        sequencer: sequencer of the same rank; has `can_replay` if there is a replay endpoint.
        endpoint: address of the publisher, such as ``ipc:///run/kv-events`` or ``tcp://127.0.0.1:5557``.
        replay_endpoint: address for requesting missing batches; empty: the engine has none.
        topic: prefix of the topics to subscribe to.
        binds: bind the endpoint instead of connecting to it, because the publisher connects.

    Raises:
        SluiceError: FAILED_PRECONDITION when pyzmq is not installed.
    """

    def __init__(
        self,
        sequencer: EventSequencer,
        endpoint: str,
        replay_endpoint: str = "",
        topic: str = "",
        *,
        binds: bool = False,
    ) -> None:
        self._sequencer = sequencer
        self._endpoint = endpoint
        self._replay_endpoint = replay_endpoint
        self._topic = topic.encode()
        self._binds = binds
        self._context: Context = _context()
        self._socket: Socket | None = None
        self._monitor: Socket | None = None  # receives what happens to the connection

    def open(self) -> None:
        """Subscribes to the publisher; events are queued until `run`.

        Raises:
            SluiceError: INVALID_ARGUMENT when the endpoint cannot be opened.
        """
        import zmq

        socket = self._context.socket(zmq.SUB)
        socket.set(zmq.RCVHWM, QUEUED_MESSAGES)
        socket.set(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        socket.set(zmq.SUBSCRIBE, self._topic)
        self._monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        try:
            if self._binds:
                socket.bind(self._endpoint)
            else:
                socket.connect(self._endpoint)
        except zmq.ZMQError as error:
            socket.disable_monitor()
            socket.close(linger=0)
            raise SluiceError(
                ErrorKind.INVALID_ARGUMENT, f"The worker cannot receive KV events from {self._endpoint}: {error}."
            ) from error
        self._socket = socket

    def close(self) -> None:
        """Closes the socket; idempotent."""
        socket, self._socket, self._monitor = self._socket, None, None
        if socket is not None:
            socket.disable_monitor()
            socket.close(linger=0)

    async def run(self) -> None:
        """Receives events until cancelled."""
        if self._socket is None:
            self.open()
        try:
            self._sequencer.check()  # the engine may have published events before
            while True:
                if self._sequencer.replay_from is not None:
                    await self._replay(self._sequencer.replay_from)
                await self._read_some()
        finally:
            self.close()

    async def _read_some(self) -> None:
        import zmq
        from zmq.asyncio import Poller

        socket, monitor = self._socket, self._monitor
        assert socket is not None
        assert monitor is not None
        poller = Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(monitor, zmq.POLLIN)
        ready = dict(await poller.poll(int(IDLE_S * 1000)))
        if not ready:
            self._sequencer.check()
        if monitor in ready:
            self._take_change(await monitor.recv_multipart())
        if socket not in ready or self._sequencer.replay_from is not None:
            return
        for _ in range(MESSAGES_PER_TURN):
            self._take(await socket.recv_multipart())
            if self._sequencer.replay_from is not None or not await socket.poll(0):
                return
        await asyncio.sleep(0)

    def _take_change(self, frames: list[bytes]) -> None:
        """Handles a connection that began or ended; a later one has missed what was published meanwhile."""
        import zmq

        if int.from_bytes(frames[0][:2], sys.byteorder) == zmq.EVENT_DISCONNECTED:
            log.info("the connection to the KV events ended", extra={"endpoint": self._endpoint})
            self._sequencer.disconnected()
        else:
            self._sequencer.check()

    def _take(self, frames: list[bytes]) -> None:
        if len(frames) != 3 or len(frames[1]) != 8:
            log.warning("ignored a message that is not a batch of KV events", extra={"frames": len(frames)})
            return
        sequence = int.from_bytes(frames[1], "big")
        batch = self._decode(sequence, frames[2])
        if batch is not None:
            self._sequencer.live(sequence, batch)

    def _decode(self, sequence: int, payload: bytes, replayed: bool = False) -> EngineBatch | None:
        try:
            return decode(payload)
        except MalformedEvents as error:
            log.warning("%s", error)
            self._sequencer.unreadable(sequence, replayed)
            return None

    async def _replay(self, start: int) -> None:
        import zmq

        try:
            await self._request_replay(start)
        except (TimeoutError, zmq.ZMQError) as error:
            log.warning("engine did not replay its KV events", extra={"reason": str(error) or "timeout"})
        finally:
            self._sequencer.replay_ended()

    async def _request_replay(self, start: int) -> None:
        """Requests batches from `start` on, over a new socket, so that late responses to earlier ones are dropped."""
        import zmq

        socket = self._context.socket(zmq.DEALER)
        try:
            socket.set(zmq.RCVHWM, QUEUED_MESSAGES)
            socket.set(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
            socket.connect(self._replay_endpoint)
            async with asyncio.timeout(REPLAY_TIMEOUT_S):
                await socket.send_multipart([b"", start.to_bytes(8, "big")])
            while await self._take_replayed(socket):
                pass
        finally:
            socket.close(linger=0)

    async def _take_replayed(self, socket: Socket) -> bool:
        """Receives one replayed message; returns False at the end of the replay."""
        async with asyncio.timeout(REPLAY_TIMEOUT_S):
            frames: list[bytes] = await socket.recv_multipart()
        if len(frames) < 2 or len(frames[-2]) != 8:
            return True
        if frames[-2] == END_OF_REPLAY:
            return False
        sequence = int.from_bytes(frames[-2], "big")
        batch = self._decode(sequence, frames[-1], replayed=True)
        if batch is not None:
            self._sequencer.replayed(sequence, batch)
        return True


def _context() -> Any:
    try:
        import zmq.asyncio
    except ImportError as error:
        raise SluiceError(
            ErrorKind.FAILED_PRECONDITION, "KV events over ZMQ require pyzmq; install sluice-llm[zmq]."
        ) from error
    return zmq.asyncio.Context.instance()


def endpoint_of_rank(endpoint: str, rank: int) -> str:
    """Returns the endpoint of a rank, given rank 0's: TCP ports are incremented, other addresses get a suffix."""
    if rank == 0 or not endpoint:
        return endpoint
    if endpoint.startswith("tcp://"):
        host, _, port = endpoint.rpartition(":")
        return f"{host}:{int(port) + rank}"
    return f"{endpoint}_dp{rank}"
