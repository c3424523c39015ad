"""The caller of a postprocess session, in memory: what it got, and how it goes on with another replica."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from services.common.packages.model_files import ModelSpec
from services.postprocess.detokenize.stream import Finish
from services.postprocess.detokenize.vocabulary import Vocabulary
from services.postprocess.metrics import Metrics
from services.postprocess.parsers.events import CallArguments, CallStart, Content, Degraded, Reasoning
from services.postprocess.streams.resume import Resume
from services.postprocess.streams.session import PostSession, SessionLimits
from services.postprocess.streams.vocabulary_registry import VocabularyRegistry


@dataclass
class Client:
    """What one stream's caller has got."""

    content: str = ""
    reasoning: str = ""
    calls: dict[int, list[str]] = field(default_factory=dict)
    degraded: set[str] = field(default_factory=set)
    order: list[str] = field(default_factory=list)
    pieces: list[bytes] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    finish: Finish | None = None
    draining: bool = False

    def read(self, session: PostSession) -> None:
        """Takes what is ready of the only stream."""
        batch = session.drain()
        if batch is None:
            return
        assert self.finish is None, "nothing comes after the end"
        self.content += batch.text
        self.draining = self.draining or batch.draining
        for _, tokens in batch.tokens:
            start = 0
            for length in tokens.lengths:
                self.pieces.append(bytes(tokens.pieces[start : start + length]))
                start += length
            self.offsets += tokens.offsets
        for _, events in batch.events:
            for event in events:
                self._take(event)
        for _, finish in batch.finishes:
            self.finish = finish

    def _take(self, event: object) -> None:
        if not isinstance(event, Degraded) and self.order[-1:] != [type(event).__name__]:
            self.order.append(type(event).__name__)
        if isinstance(event, Content):
            self.content += event.text
        elif isinstance(event, Reasoning):
            self.reasoning += event.text
        elif isinstance(event, CallStart):
            assert event.call not in self.calls, "a call begins once"
            self.calls[event.call] = [event.id, event.name, ""]
        elif isinstance(event, CallArguments):
            self.calls[event.call][2] += event.text
        elif isinstance(event, Degraded):
            self.degraded.add(event.reason)

    def resume(self, tokens: Sequence[int]) -> Resume:
        """What another replica has to know, which was given `tokens`."""
        sent = {call: len(arguments) for call, (_, _, arguments) in self.calls.items()}
        return Resume(tokens, len(self.content), len(self.reasoning), sent, len(self.pieces))


async def session_of(vocabulary: Vocabulary, limits: SessionLimits | None = None) -> PostSession:
    """A session that serves this vocabulary as model m."""
    library = VocabularyRegistry([ModelSpec("m", "anywhere")], 30, lambda spec: vocabulary)
    await library.load_all()
    return PostSession(library, limits or SessionLimits(), Metrics(), lambda: None)
