"""Assigns streams to postprocess replicas, and moves them when a replica is lost or drains.

A replica's state can be rebuilt from the tokens of its streams. When a replica is lost or drains, its streams are
therefore replayed on another one: opened with their tokens and the amount of output already sent, and continued.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from time import perf_counter

from services.common.base.errors import SluiceError, unavailable
from services.common.base.shared_steps import shared_step
from services.common.rpc.replicas import idlest
from services.gateway.backends.rpc.postprocess_link import PostLink
from services.gateway.metrics import GatewayMetrics
from services.gateway.streams.states import TextState
from services.gateway.streams.stream import GenerationStream

log = logging.getLogger(__name__)

MAX_REPLAYS = 3
"""Postprocess replicas that a stream may lose, as it may be what ends them; with one more it fails."""
REPLACED = "postprocess_replaced"
DRAINING = "draining"


class PostprocessPool:
    """The links to postprocess replicas, and the streams on them.

    Args:
        fail: fails a stream with an error.
        degrade: records a fallback of a stream.
        isolated: calls a function with a stream; an exception fails only that stream.
        wait_s: how long a stream waits while no replica is available.

    Attributes:
        links: links by address.
    """

    def __init__(
        self,
        fail: Callable[[GenerationStream, SluiceError], None],
        degrade: Callable[[GenerationStream, str], None],
        isolated: Callable[[GenerationStream, Callable[[GenerationStream], None]], None],
        metrics: GatewayMetrics,
        wait_s: float,
    ) -> None:
        self.links: dict[str, PostLink] = {}
        self._fail = fail
        self._degrade = degrade
        self._isolated = isolated
        self._metrics = metrics
        self._wait_s = wait_s
        self._elsewhere: dict[int, GenerationStream] = {}  # streams that no replica has, by slot

    def add_link(self, link: PostLink) -> None:
        """Adds the link to a replica."""
        self.links[link.address] = link

    def remove_link(self, link: PostLink) -> None:
        """Removes a link that has been closed."""
        del self.links[link.address]

    @property
    def single_replica(self) -> PostLink | None:
        """The link that carries all streams; None if there may be several, or streams without a link."""
        if len(self.links) != 1 or self._elsewhere:
            return None
        return next(iter(self.links.values()))

    @property
    def waiting(self) -> list[GenerationStream]:
        """The streams that wait for a replica."""
        return [stream for stream in self._elsewhere.values() if stream.text_state is TextState.WAITING]

    def least_loaded(self) -> PostLink | None:
        """Returns the replica with the fewest streams that accepts new ones, or None."""
        links = [link for link in self.links.values() if link.connected and not link.retired and not link.leaving]
        return idlest(links, lambda link: link.live)

    def start(self, stream: GenerationStream) -> None:
        """Opens a new stream, unless its engine makes the text, or must tokenize the prompt before `open` is called."""
        if not stream.request.engine_text and stream.prompt.raw is None:
            self.open(stream)
            return
        self._elsewhere[stream.slot] = stream
        if stream.request.engine_text:
            stream.text_state = TextState.ENGINE

    def open(self, stream: GenerationStream) -> None:
        """Opens or replays a stream on a replica; if none is available, as soon as one connects."""
        link = stream.custom_text or self.least_loaded()
        if link is None:
            stream.text_state, stream.waiting_since = TextState.WAITING, perf_counter()
            self._elsewhere[stream.slot] = stream
            return
        if stream.custom_text is not None:
            self._elsewhere[stream.slot] = stream
        else:
            self._elsewhere.pop(stream.slot, None)
        stream.text_state, stream.post = TextState.OPEN, link
        link.adopt(stream)
        try:
            link.open(stream)
        except SluiceError as error:
            self._fail(stream, error)
            return
        if stream.end is not None:
            link.end(stream.slot, *stream.end)

    def remove(self, stream: GenerationStream) -> None:
        """Removes a stream that has ended."""
        stream.text_state = TextState.CLOSED
        self._elsewhere.pop(stream.slot, None)
        _detach(stream)

    @shared_step("gateway.open_waiting")
    def on_available(self) -> None:
        """Opens waiting streams, and moves those of draining replicas, once a replica has connected or serves again."""
        for stream in self.waiting:
            if stream.text_state is TextState.WAITING:  # it may have ended together with another choice
                self._isolated(stream, self.open)
        for other in self.links.values():
            if other.leaving and other.connected:
                self.drain(other)

    @shared_step("gateway.drain_texts")
    def drain(self, link: PostLink) -> None:
        """Moves the streams of a draining replica; they stay while no other replica is available."""
        if self.least_loaded() is None:
            return
        moving = list(link.streams.values())
        for stream in moving:
            if stream.post is link:
                self._metrics.text_moved("drained")
                self._isolated(stream, self._reopen)
        link.abandon()
        if moving:
            log.info("moved streams off a draining postprocess replica", extra={"streams": len(moving)})

    @shared_step("gateway.texts_lost")
    def on_lost(self, link: PostLink, error: SluiceError) -> None:
        """Replays the streams of a lost replica on others."""
        for stream in list(link.streams.values()):
            if stream.post is link:  # it may have ended together with another choice
                self._isolated(stream, lambda lost: self._replay(lost, error))

    def on_refused(self, stream: GenerationStream, error: SluiceError) -> bool:
        """Replays a stream that a replica refused; returns False if the error is not retryable."""
        if not error.retryable:
            return False
        if error.code == DRAINING and stream.post is not None:
            stream.post.leaving = True
            self._reopen(stream)
        else:
            self._replay(stream, error)
        return True

    def sweep(self) -> None:
        """Fails the streams that have waited too long for a replica."""
        now = perf_counter()
        for stream in self.waiting:
            if now - stream.waiting_since > self._wait_s:
                error = unavailable("No postprocess replica is ready; try again later.", code="service_unavailable")
                self._fail(stream, error)

    def _replay(self, stream: GenerationStream, error: SluiceError) -> None:
        stream.replays += 1
        if stream.replays > MAX_REPLAYS:  # the stream itself may crash the replicas
            self._fail(stream, error)
            return
        self._metrics.text_moved("lost")
        self._degrade(stream, REPLACED)
        self._reopen(stream)

    def _reopen(self, stream: GenerationStream) -> None:
        _detach(stream)
        if stream.span is not None:
            stream.span.add_event("text replayed", {"tokens": len(stream.tokens)})
        self.open(stream)


def _detach(stream: GenerationStream) -> None:
    post, stream.post = stream.post, None
    if post is not None:
        post.release(stream)
