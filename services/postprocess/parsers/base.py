"""Base class of parsers, which convert text to events independently of how the text is split into pieces."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, ClassVar

from services.postprocess.parsers.events import Content, Event, PlainKind

_ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True)
class ParserContext:
    """Context of a generation that is known before its first token.

    Attributes:
        tools: the tools of the request in OpenAI format.
        required: the model must call at least one tool.
        only: the only tool that may be called; empty for any.
        single: at most one call.
        guided: a grammar constrains the output.
        prompt_tail: the end of the prompt as text, including special tokens.
        identity: of the stream; call ids derive from it, so that parsing a stream again produces the same ids.
        prompt_ids: the end of the prompt as ids.
        template_kwargs: the caller's arguments for the chat template.
        source: location of the model's files, for parsers that load a tokenizer.
        thinking: the prompt ends inside a thought of the message that the model continues.
    """

    tools: Sequence[dict[str, Any]] = ()
    required: bool = False
    only: str = ""
    single: bool = False
    guided: bool = False
    prompt_tail: str = ""
    identity: str = ""
    prompt_ids: Sequence[int] = ()
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""
    thinking: bool = False
    names: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        names = [tool["function"]["name"] for tool in self.tools] if self.tools else ()
        object.__setattr__(self, "names", frozenset(names))

    def token(self, index: int, length: int) -> str:
        """Returns `length` letters and digits that are unique to a call of this stream."""
        number = int.from_bytes(blake2b(f"{self.identity}\0{index}".encode(), digest_size=32).digest(), "big")
        letters = []
        for _ in range(length):
            number, digit = divmod(number, len(_ALPHABET))
            letters.append(_ALPHABET[digit])
        return "".join(letters)

    def hex(self, index: int, length: int) -> str:
        """Returns `length` hexadecimal digits that are unique to a call of this stream."""
        size = (length + 1) // 2
        return blake2b(f"{self.identity}\0{index}".encode(), digest_size=min(size, 64)).hexdigest()[:length]


class Parser(ABC):
    """Parses the text of one generation. A parser guarantees:

    - The events do not depend on how the text is split into pieces, once adjacent events of a kind are merged.
    - No text is lost: text that turns out not to be markup becomes content.
    - Certain text is returned immediately; `held` is the rest. A built-in parser holds the end of the text it was fed,
      from which its stream recovers that text if the parser fails.
    - Built-in parsers take linear time, however the text is split.

    Args:
        context: of the generation.

    Attributes:
        markers: special tokens that the parser needs in the text. Other special tokens are omitted on request.
        reasoning: whether the last text belongs to the reasoning.
        retracted: the text that `reasoning` counted turned out to be content; known at the end.
        reasoning_tokens: reasoning tokens that `reasoning` does not count; known at the end.
    """

    markers: ClassVar[frozenset[str]] = frozenset()
    reasoning: bool = False
    retracted: bool = False
    reasoning_tokens: int = 0

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "feed" in cls.__dict__ and "plain" not in cls.__dict__:  # an inherited `plain` would bypass this `feed`
            cls.plain = Parser.plain  # type: ignore[method-assign]

    def __init__(self, context: ParserContext) -> None:
        self.context = context

    @abstractmethod
    def feed(self, text: str) -> list[Event]:
        """Parses the next text, which is never empty."""

    @abstractmethod
    def finish(self) -> list[Event]:
        """Ends the text; called once, as the last method."""

    def plain(self, text: str) -> PlainKind:
        """Returns the type of the only event of a text that certainly has no markup; None leaves the text to `feed`.

        Called before `feed`, with the text of one or more tokens. Must not change the parser, must not raise, and must
        take a small part of the time of `feed`; a parser that returns a type holds no text. Optional; a class that
        overrides `feed` alone does not inherit it.
        """
        return None

    @property
    def held(self) -> str:
        """Text fed but not returned yet; it becomes content if the parser fails."""
        return ""

    @property
    def held_size(self) -> int:
        """Number of characters in `held`; read before every piece, so built-in parsers compute it without `held`."""
        return len(self.held)


class Chain(Parser):
    """Feeds the content of one parser to the next: reasoning first, then tool calls."""

    def __init__(self, first: Parser, second: Parser) -> None:
        super().__init__(second.context)
        self._first = first
        self._second = second
        self.reasoning = first.reasoning

    def feed(self, text: str) -> list[Event]:
        events = self._forward(self._first.feed(text))
        self.reasoning = self._first.reasoning
        return events

    def plain(self, text: str) -> PlainKind:
        kind = self._first.plain(text)
        return self._second.plain(text) if kind is Content else kind

    def finish(self) -> list[Event]:
        return self._forward(self._end_first()) + self._second.finish()

    def _end_first(self) -> list[Event]:
        events = self._first.finish()
        self.reasoning, self.retracted = self._first.reasoning, self._first.retracted
        return events

    def _forward(self, found: list[Event]) -> list[Event]:
        events: list[Event] = []
        for event in found:
            if isinstance(event, Content):
                events += self._second.feed(event.text)
            else:
                events.append(event)
        return events

    @property
    def held(self) -> str:
        return self._second.held + self._first.held

    @property
    def held_size(self) -> int:
        return self._second.held_size + self._first.held_size
