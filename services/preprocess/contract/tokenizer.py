"""The interface of every tokenizer implementation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, Protocol

from services.common.base.errors import invalid
from services.common.base.packing import pack_u32
from services.common.types.media.facts import ImageFacts, MediaFacts
from services.common.types.media.spans import MediaKind
from services.preprocess.contract.generation_defaults import NO_DEFAULTS, GenerationDefaults

Message = dict[str, Any]
Tool = dict[str, Any]


@dataclass(frozen=True)
class CacheStats:
    """Statistics of a cache; all but `entries` in bytes.

    Attributes:
        held: memory in use.
        limit: maximum memory.
        entries: cached segments.
        hit: text found in the cache.
        missed: text that was encoded.
    """

    held: int
    limit: int
    entries: int
    hit: int
    missed: int


@dataclass(frozen=True)
class ChatRequest:
    """The inputs of a chat's prompt, checked for shape and otherwise as sent by the client.

    Attributes:
        messages: OpenAI messages, at least one.
        tools: OpenAI tools available to the model; None for none.
        template_kwargs: extra variables of the chat template.
        chat_template: replaces the model's own template; empty to keep that one.
        add_generation_prompt: whether to end with the start of an assistant turn; None means yes, unless the final
            message is continued.
        continue_final_message: whether to leave the last message open so that the model continues it.
        documents: for retrieval templates; None for none.
        tool_choice: OpenAI tool_choice; None when unset.
        notes: filled by the tokenizer: what the prompt shows in another place or form than the client's.
    """

    messages: list[Message]
    tools: list[Tool] | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    chat_template: str = ""
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    documents: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    notes: list[str] = field(default_factory=list, compare=False)

    @property
    def prompt_tools(self) -> list[Tool] | None:
        """The tools included in the prompt; none with tool_choice "none"."""
        return self.tools if self.tool_choice != "none" else None


EFFORT = "reasoning_effort"
HINTS = frozenset((EFFORT, "enable_thinking", "thinking"))
"""Arguments of chat templates that many clients send to every model."""


@dataclass(frozen=True)
class TokenizerFacts:
    """Constant properties of a loaded tokenizer.

    Attributes:
        processor: implementation, such as "hf".
        fingerprint: hex SHA-256 of the tokenizer's files; equal fingerprints mean equal ids.
        vocab_size: upper bound (exclusive) of ids.
        eos_ids: the model's end-of-sequence ids.
        stop_ids: further ids that end a turn.
        context_length: maximum tokens of prompt and output together, from the model's files; 0 for unknown.
        has_chat_template: whether chat requests work without a template in the request.
        template_fingerprint: hex SHA-256 of the chat template; empty for none.
        backend: library that encodes text; empty for the implementation's own.
        prompt_fingerprint: digests of a fixed set of chats, see `probes`; empty until the tokenizer is served.
        media_fingerprint: the same of chats with sample items; empty if the tokenizer takes none.
        defaults: sampling defaults from the model's files.
        cache_refusal: why prompt segments are not cached; empty when they are, or when there is no such cache.
        without_effect: those of HINTS that change no prompt of this model.
        template: what the model's chat template shows, as JSON; see `templates.capabilities`. Empty: not known.
    """

    processor: str
    fingerprint: str
    vocab_size: int
    eos_ids: tuple[int, ...] = ()
    stop_ids: tuple[int, ...] = ()
    context_length: int = 0
    has_chat_template: bool = False
    template_fingerprint: str = ""
    backend: str = ""
    cache_refusal: str = ""
    prompt_fingerprint: str = ""
    media_fingerprint: str = ""
    defaults: GenerationDefaults = NO_DEFAULTS
    without_effect: frozenset[str] = frozenset()
    template: Mapping[str, Any] = field(default_factory=dict)


class MediaRule(Protocol):
    """Which tokens stand for an item of one kind of a model.

    Attributes:
        token_id: what stands in place of an item before expansion.
        blocks: whether `ids_of` may wait for another process, so that new facts must be looked up off the event loop.
    """

    blocks: ClassVar[bool] = False
    token_id: int

    def ids_of(self, facts: MediaFacts) -> array[int]:
        """Returns the tokens, as array("I").

        Raises:
            ValueError: the model does not take such items; the text completes the sentence "The image …", or that of
                another kind.
        """
        ...

    def close(self) -> None:
        """Releases what it holds; called once."""
        return


class ImageRule(MediaRule):
    """Which tokens stand for an image of a model, by its size."""

    def ids_of(self, facts: MediaFacts) -> array[int]:
        assert isinstance(facts, ImageFacts)
        return self.ids(facts.width, facts.height)

    @abstractmethod
    def ids(self, width: int, height: int) -> array[int]:
        """Returns the tokens as `ids_of`; raises ValueError for sizes that the model does not take."""


MediaRules = Mapping[MediaKind, MediaRule]
"""The rules of a model by kind."""


def kinds_of(tokenizer: TokenizerProtocol) -> Collection[MediaKind]:
    """Returns the kinds of media items that a tokenizer takes."""
    return tokenizer.media_kinds or tokenizer.media_rules.keys()


@dataclass(frozen=True)
class PendingPrompt:
    """A chat whose template runs in another process.

    Attributes:
        render: starts rendering; to be awaited on the event loop.
        finish: converts the template's output into the prompt.
        pack: returns the packed ids of the prompt; None for those of `pack_text` without special tokens.
        shown: returns the prompt as clients may see it; None for the same.
        notes: of the chat, once it is rendered.
    """

    render: Callable[[], Awaitable[str]]
    finish: Callable[[str], str]
    pack: Callable[[str], bytes] | None = None
    shown: Callable[[str], str] | None = None
    notes: Sequence[str] = ()

    async def text(self) -> str:
        """Returns the prompt; raises SluiceError as TokenizerProtocol.render."""
        return self.finish(await self.render())


class TokenizerProtocol(ABC):
    """Converts requests into token ids and ids into text. Thread-safe; never awaits.

    A subclass implements `tokenize` and `decode`; everything else has a default that works with these two. Every method
    raises SluiceError(INVALID_ARGUMENT), naming the request's field, for a request that can never succeed.

        class ByteTokenizer(TokenizerProtocol):
            def __init__(self, path: Path) -> None: ...

            def tokenize(self, messages, model, tools=None):
                return list("\\n".join(message["content"] for message in messages).encode())

            def decode(self, token_ids, skip_special_tokens=False):
                return bytes(token_ids).decode("utf-8", "replace")

    Attributes:
        facts: without any, those of the model's files; see `custom.facts_of`.
        model: the served name of the model, for implementations of several; set when the tokenizer is loaded.
        blocks: whether methods wait for more than computation, so that they must stay off the event loop.
        media_rules: how media items become tokens; a tokenizer that makes the tokens itself has `media_kinds` instead.
        no_images: why it takes no images, as a sentence; may be empty.
        renders_apart: whether the model's own template runs in another process, so that chats start with `begin_chat`.
    """

    blocks: ClassVar[bool] = False
    renders_apart: bool = False
    media_rules: MediaRules = MappingProxyType({})
    media_kinds: Collection[MediaKind] = ()
    no_images: str = ""
    model: str = ""
    facts: TokenizerFacts

    @abstractmethod
    def tokenize(self, messages: list[Message], model: str, tools: list[Tool] | None = None) -> list[int]:
        """Returns ids of a plain chat; `model` is the served name, for implementations of several models."""

    @abstractmethod
    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Returns the text of ids below `facts.vocab_size`; invalid UTF-8 becomes U+FFFD."""

    @property
    def cache_stats(self) -> CacheStats | None:
        """Statistics of the cache of prompt segments; None without one."""
        return None

    def pack_chat(self, chat: ChatRequest) -> bytes:
        """Returns `encode_chat` as packed uint32; override it to avoid Python integers."""
        return pack_u32(self.encode_chat(chat))

    def pack_text(self, text: str, add_special_tokens: bool | None = None) -> bytes:
        """Returns `encode_text` as packed uint32."""
        return pack_u32(self.encode_text(text, add_special_tokens))

    def pack_pair(self, first: str, second: str, add_special_tokens: bool | None = None) -> tuple[bytes, int]:
        """Returns packed ids of a pair of texts, and the index of the first one of the second text."""
        raise invalid("This model's tokenizer does not encode pairs of texts; use a model that compares texts.")

    def begin_chat(self, chat: ChatRequest) -> PendingPrompt | None:
        """Starts a chat's prompt for an event loop to await; None if `pack_chat` computes it at once.

        Its ids are those of `pack_text` without special tokens.
        """
        return None

    def encode_chat(self, chat: ChatRequest) -> list[int]:
        """Returns ids of a chat's prompt: those of `render`, with control tokens only where the template put them.

        By default those of `tokenize`, which refuses what a plain chat cannot express; hints without effect are none.
        """
        for field_name, value in (
            ("chat_template", chat.chat_template),
            ("continue_final_message", chat.continue_final_message),
            ("add_generation_prompt", chat.add_generation_prompt is False),
            ("documents", chat.documents),
            ("chat_template_kwargs", chat.template_kwargs.keys() - HINTS),
        ):
            if value:
                raise invalid(
                    f"This model's tokenizer takes messages and tools only; leave {field_name} out.", param=field_name
                )
        return self.tokenize(chat.messages, self.model, chat.prompt_tools)

    def render(self, chat: ChatRequest) -> str:
        """Returns the prompt as text, including control tokens."""
        return self.decode(self.encode_chat(chat))

    def encode_text(self, text: str, add_special_tokens: bool | None = None) -> list[int]:
        """Returns ids of plain text; None adds the special tokens that the model's tokenizer adds by default."""
        raise invalid("This model's tokenizer encodes chats only; send messages, or the token ids of the text.")

    def close(self) -> None:
        """Releases resources, such as processes; may block, so called off the event loop."""
        return


class ChatTokenizer(TokenizerProtocol):
    """A tokenizer that takes all inputs of a chat; implements `encode_chat` and `decode`."""

    @abstractmethod
    def encode_chat(self, chat: ChatRequest) -> list[int]: ...

    def tokenize(self, messages: list[Message], model: str, tools: list[Tool] | None = None) -> list[int]:
        return self.encode_chat(ChatRequest(messages, tools))
