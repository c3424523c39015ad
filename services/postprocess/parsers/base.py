"""What a parser is: text in, in any pieces; events out, the same for any pieces."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, ClassVar

from services.postprocess.parsers.events import Content, Event

_ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True)
class ParserContext:
    """What is known about the answer before it begins.

    Attributes:
        tools: the tools of the request, OpenAI form.
        required: at least one call is demanded.
        only: the one tool that may be called; empty for any.
        single: at most one call.
        guided: a grammar constrains the output.
        prompt_tail: the end of the prompt as text, special tokens included.
        identity: of the stream; call ids are made of it, so that a stream that is parsed again gives the same ids.
        prompt_ids: the end of the prompt as ids.
        template_kwargs: what the caller gave the chat template.
        source: where the model's files are; for parsers that bring their own tokenizer.
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
    names: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", frozenset(tool["function"]["name"] for tool in self.tools))

    def token(self, index: int, length: int) -> str:
        """`length` letters and digits that no other call of any stream has."""
        number = int.from_bytes(blake2b(f"{self.identity}\0{index}".encode(), digest_size=32).digest(), "big")
        letters = []
        for _ in range(length):
            number, digit = divmod(number, len(_ALPHABET))
            letters.append(_ALPHABET[digit])
        return "".join(letters)

    def hex(self, index: int, length: int) -> str:
        """The same in hexadecimal digits."""
        size = (length + 1) // 2
        return blake2b(f"{self.identity}\0{index}".encode(), digest_size=min(size, 64)).hexdigest()[:length]


class Parser(ABC):
    """Reads one answer. A parser keeps these promises:

    - However the text is cut into pieces, the events say the same when neighbours of a kind are joined.
    - No text is lost: what turns out to be no markup is content.
    - What is certain is told at once; `held` is what is not. A built-in parser holds the end of the text that it was
      fed, which is how its stream recovers that text should the parser fail.
    - The built-in ones take time in proportion to the text, however it is cut.

    Args:
        context: what is known beforehand.

    Attributes:
        markers: special tokens that the parser must see. Other special tokens are left out as the caller wishes.
        reasoning: whether what came last belongs to the model's thinking.
        reasoning_tokens: tokens of thinking that `reasoning` does not count; known at the end.
    """

    markers: ClassVar[frozenset[str]] = frozenset()
    reasoning: bool = False
    reasoning_tokens: int = 0

    def __init__(self, context: ParserContext) -> None:
        self.context = context

    @abstractmethod
    def feed(self, text: str) -> list[Event]:
        """The next text, never empty."""

    @abstractmethod
    def finish(self) -> list[Event]:
        """The text is over; called once, and nothing after it."""

    @property
    def held(self) -> str:
        """Text that was taken in and not yet told; it becomes content should the parser fail."""
        return ""

    @property
    def held_size(self) -> int:
        """Characters in `held`. Asked before every piece of text, so a built-in parser does not build `held` for it."""
        return len(self.held)


class Chain(Parser):
    """Content of one parser is the text of the next: reasoning first, then tool calls."""

    def __init__(self, first: Parser, second: Parser) -> None:
        super().__init__(second.context)
        self._first = first
        self._second = second
        self.reasoning = first.reasoning

    def feed(self, text: str) -> list[Event]:
        """See Parser."""
        events = self._pass_on(self._first.feed(text))
        self.reasoning = self._first.reasoning
        return events

    def finish(self) -> list[Event]:
        """See Parser."""
        return self._pass_on(self._first.finish()) + self._second.finish()

    def _pass_on(self, found: list[Event]) -> list[Event]:
        events: list[Event] = []
        for event in found:
            if isinstance(event, Content):
                events += self._second.feed(event.text)
            else:
                events.append(event)
        return events

    @property
    def held(self) -> str:
        """See Parser."""
        return self._second.held + self._first.held

    @property
    def held_size(self) -> int:
        """See Parser."""
        return self._second.held_size + self._first.held_size
