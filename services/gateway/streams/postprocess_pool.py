"""Which postprocess replica makes the text of which stream, through deaths and drains of replicas.

A replica holds nothing that cannot be made again from a stream's tokens. So when one is lost, or asks to be left, its
streams are opened on another one with their tokens and with how much their clients have got, and go on from there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from time import perf_counter

from services.common.errors import SluiceError, unavailable
from services.common.observability import telemetry
from services.common.rpc.least_loaded import idlest
from services.gateway.clients.postprocess_link import PostLink
from services.gateway.metrics import GatewayMetrics
from services.gateway.streams.stream import GenerationStream

log = logging.getLogger(__name__)

MOST_REPLAYS = 3
REPLACED = "postprocess_replaced"
DRAINING = "draining"


class PostprocessPool:
    """The links to postprocess, and the streams on them.

    Args:
        fail: ends a stream with an error.
        degrade: marks a stream.
        guarded: calls a function with a stream; what it raises ends that stream only.
        wait_s: how long a stream waits for a replica when there is none.

    Attributes:
        links: by address; a link is added and removed by the owner of its connection.
        custom: gives the link to a stage of the operator's that makes the text of a model, or None.
    """

    def __init__(
        self,
        fail: Callable[[GenerationStream, SluiceError], None],
        degrade: Callable[[GenerationStream, str], None],
        guarded: Callable[[GenerationStream, Callable[[GenerationStream], None]], None],
        metrics: GatewayMetrics,
        wait_s: float,
    ) -> None:
        self.links: dict[str, PostLink] = {}
        self._fail = fail
        self._degrade = degrade
        self._guarded = guarded
        self._metrics = metrics
        self._wait_s = wait_s
        self._waiting: dict[int, GenerationStream] = {}
        self._held: set[int] = set()
        self._apart: set[int] = set()  # streams whose text no replica makes
        self.custom: Callable[[str], PostLink | None] = _no_stage

    @property
    def sole(self) -> PostLink | None:
        """The link that every stream is on; None when they may be on several or on none."""
        if len(self.links) != 1 or self._waiting or self._held or self._apart:
            return None
        return next(iter(self.links.values()))

    @property
    def waiting(self) -> int:
        """Streams that no replica has taken up yet."""
        return len(self._waiting)

    def best(self) -> PostLink | None:
        """A replica with the fewest streams, of those that take new ones."""
        links = [link for link in self.links.values() if link.connected and not link.retired and not link.leaving]
        return idlest(links, lambda link: link.live)

    def keep_apart(self, stream: GenerationStream) -> None:
        """Notes a stream whose worker makes its text."""
        self._apart.add(stream.slot)

    def hold(self, stream: GenerationStream) -> None:
        """A stream's text will begin later, with the tokens that it has then."""
        self._held.add(stream.slot)

    def open(self, stream: GenerationStream) -> None:
        """Begins a stream's text, or goes on with it; when there is no replica, as soon as there is one."""
        self._held.discard(stream.slot)
        link = self.custom(stream.model)
        if link is not None:
            self._apart.add(stream.slot)
        else:
            link = self.best()
        if link is None:
            stream.waiting_since = perf_counter()
            self._waiting[stream.slot] = stream
            return
        self._waiting.pop(stream.slot, None)
        stream.post = link
        link.adopt(stream)
        began = bool(stream.tokens)
        stream.sent.text = stream.text_sent
        try:
            link.open(
                stream.slot,
                stream.request_id,
                stream.request,
                stream.prompt,
                telemetry.trace_context(stream.current_span),
                stream.max_tokens,
                stream.tokens if began else None,
                stream.sent if began else None,
            )
        except SluiceError as error:
            self._fail(stream, error)
            return
        if stream.end is not None:
            link.end(stream.slot, *stream.end)

    def forget(self, stream: GenerationStream) -> None:
        """A stream is over."""
        self._held.discard(stream.slot)
        self._apart.discard(stream.slot)
        self._waiting.pop(stream.slot, None)
        self._leave(stream)

    def connected(self, link: PostLink) -> None:
        """Opens the streams that wait for a replica, or that another replica asked to be moved."""
        for stream in list(self._waiting.values()):
            if stream.slot in self._waiting:  # else it ended with another choice of its answer
                self._guarded(stream, self.open)
        for other in self.links.values():
            if other.leaving and other.connected:
                self.leave(other)

    def leave(self, link: PostLink) -> None:
        """A replica asked for its streams to be moved; they stay while there is no other one."""
        if self.best() is None:
            return
        moving = self._streams_of(link)
        for stream in moving:
            if stream.post is link:
                self._metrics.text_moved("drained")
                self._guarded(stream, self._reopen)
        link.abandon()
        if moving:
            log.info("streams were moved off a draining postprocess replica", extra={"streams": len(moving)})

    def lost(self, link: PostLink, error: SluiceError) -> None:
        """A replica is gone: its streams go on elsewhere."""
        for stream in self._streams_of(link):
            if stream.post is link:  # else it ended with another choice of its answer
                self._guarded(stream, lambda lost: self._replay(lost, error))

    def refused(self, stream: GenerationStream, error: SluiceError) -> bool:
        """A replica gave a stream up; False unless another one may do better."""
        if not error.retryable:
            return False
        if error.code == DRAINING and stream.post is not None:
            stream.post.leaving = True
            self._reopen(stream)
        else:
            self._replay(stream, error)
        return True

    def sweep(self) -> None:
        """Ends the streams that have waited too long for a replica."""
        now = perf_counter()
        for stream in list(self._waiting.values()):
            if now - stream.waiting_since > self._wait_s:
                error = unavailable("No postprocess replica is ready; try again soon.", code="service_unavailable")
                self._fail(stream, error)

    def _replay(self, stream: GenerationStream, error: SluiceError) -> None:
        stream.replays += 1
        if stream.replays > MOST_REPLAYS:  # it may be this stream that they die of
            self._fail(stream, error)
            return
        self._metrics.text_moved("lost")
        self._degrade(stream, REPLACED)
        self._reopen(stream)

    def _reopen(self, stream: GenerationStream) -> None:
        self._leave(stream)
        if stream.span is not None:
            stream.span.add_event("text replayed", {"tokens": len(stream.tokens)})
        self.open(stream)

    def _leave(self, stream: GenerationStream) -> None:
        post, stream.post = stream.post, None
        if post is not None:
            post.release(stream)

    def _streams_of(self, link: PostLink) -> list[GenerationStream]:
        return list(link.streams.values())


def _no_stage(model: str) -> PostLink | None:
    return None
