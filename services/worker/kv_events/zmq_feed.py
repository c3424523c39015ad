"""KV events over ZMQ: vLLM's and SGLang's publisher, read on the event loop."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from services.common.errors import ErrorKind, SluiceError
from services.worker.kv_events.event_sequencer import EventSequencer
from services.worker.kv_events.events import EngineBatch, MalformedEvents
from services.worker.kv_events.wire import decode

if TYPE_CHECKING:
    from zmq.asyncio import Context, Socket

log = logging.getLogger(__name__)

END_OF_REPLAY = b"\xff" * 8
QUEUED_MESSAGES = 100_000
MESSAGES_A_TURN = 64
QUIET_S = 10.0
REPLAY_SILENCE_S = 5.0


class ZmqFeed:
    """Reads one rank's publisher and keeps its follower complete.

    What is published while a replay runs waits in the socket, so a replay never overtakes it.

    Args:
        follower: of the same rank; `can_replay` when there is a replay endpoint.
        endpoint: of the publisher, such as ``ipc:///run/kv-events`` or ``tcp://127.0.0.1:5557``.
        replay_endpoint: where missing batches can be asked for; empty: nowhere.
        topic: prefix of the topics to read.
        binds: this side opens the endpoint, because the publisher connects to it.

    Raises:
        SluiceError: FAILED_PRECONDITION when ZMQ is not installed.
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

    def open(self) -> None:
        """Subscribes; from now on nothing is missed that the publisher sends to a subscriber.

        Raises:
            SluiceError: INVALID_ARGUMENT when the endpoint cannot be opened.
        """
        import zmq

        socket = self._context.socket(zmq.SUB)
        socket.set(zmq.RCVHWM, QUEUED_MESSAGES)
        socket.set(zmq.SUBSCRIBE, self._topic)
        try:
            if self._binds:
                socket.bind(self._endpoint)
            else:
                socket.connect(self._endpoint)
        except zmq.ZMQError as error:
            socket.close(linger=0)
            raise SluiceError(
                ErrorKind.INVALID_ARGUMENT, f"KV events cannot be read from {self._endpoint}: {error}."
            ) from error
        self._socket = socket

    def close(self) -> None:
        """Closes the sockets; may be called twice."""
        socket, self._socket = self._socket, None
        if socket is not None:
            socket.close(linger=0)

    async def run(self) -> None:
        """Reads until cancelled."""
        if self._socket is None:
            self.open()
        try:
            self._sequencer.check()  # an engine that was here first has things to tell
            while True:
                if self._sequencer.replay_from is not None:
                    await self._replay(self._sequencer.replay_from)
                await self._read_some()
        finally:
            self.close()

    async def _read_some(self) -> None:
        socket = self._socket
        assert socket is not None
        if not await socket.poll(int(QUIET_S * 1000)):
            self._sequencer.check()
            return
        for _ in range(MESSAGES_A_TURN):
            self._take(await socket.recv_multipart())
            if self._sequencer.replay_from is not None or not await socket.poll(0):
                return
        await asyncio.sleep(0)

    def _take(self, frames: list[bytes]) -> None:
        if len(frames) != 3 or len(frames[1]) != 8:
            log.warning("a message that is no KV event was ignored", extra={"frames": len(frames)})
            return
        sequence = int.from_bytes(frames[1], "big")
        batch = self._decoded(sequence, frames[2])
        if batch is not None:
            self._sequencer.live(sequence, batch)

    def _decoded(self, sequence: int, payload: bytes) -> EngineBatch | None:
        try:
            return decode(payload)
        except MalformedEvents as error:
            log.warning("%s", error)
            self._sequencer.unreadable(sequence)
            return None

    async def _replay(self, start: int) -> None:
        import zmq

        try:
            await self._ask_again(start)
        except (TimeoutError, zmq.ZMQError) as error:
            log.warning("the engine did not replay its KV events", extra={"reason": str(error) or "timeout"})
        finally:
            self._sequencer.replay_ended()

    async def _ask_again(self, start: int) -> None:
        """Asks on a socket of its own, so that an answer that comes too late meets nobody."""
        import zmq

        socket = self._context.socket(zmq.DEALER)
        try:
            socket.set(zmq.RCVHWM, QUEUED_MESSAGES)
            socket.connect(self._replay_endpoint)
            async with asyncio.timeout(REPLAY_SILENCE_S):
                await socket.send_multipart([b"", start.to_bytes(8, "big")])
            while await self._take_replayed(socket):
                pass
        finally:
            socket.close(linger=0)

    async def _take_replayed(self, socket: Socket) -> bool:
        """One message of the answer; False when it was the last one."""
        async with asyncio.timeout(REPLAY_SILENCE_S):
            frames: list[bytes] = await socket.recv_multipart()
        if len(frames) < 2 or len(frames[-2]) != 8:
            return True
        if frames[-2] == END_OF_REPLAY:
            return False
        sequence = int.from_bytes(frames[-2], "big")
        batch = self._decoded(sequence, frames[-1])
        if batch is not None:
            self._sequencer.replayed(sequence, batch)
        return True


def _context() -> Any:
    try:
        import zmq.asyncio
    except ImportError as error:
        raise SluiceError(
            ErrorKind.FAILED_PRECONDITION, "KV events over ZMQ need pyzmq: install sluice-llm[zmq]."
        ) from error
    return zmq.asyncio.Context.instance()


def endpoint_of_rank(endpoint: str, rank: int) -> str:
    """Where a rank publishes when rank 0 does so at `endpoint`: TCP ports count up, other names get a suffix."""
    if rank == 0 or not endpoint:
        return endpoint
    if endpoint.startswith("tcp://"):
        host, _, port = endpoint.rpartition(":")
        return f"{host}:{int(port) + rank}"
    return f"{endpoint}_dp{rank}"
