"""The boundary every tokenizer implementation stands behind."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from services.common.packing import pack_u32
from services.preprocess.generation_defaults import NO_DEFAULTS, GenerationDefaults

if TYPE_CHECKING:
    from services.preprocess.encoders.segment_cache import CacheStats

Message = dict[str, Any]
Tool = dict[str, Any]


@dataclass(frozen=True)
class ChatRequest:
    """What decides a chat's prompt, checked for shape and otherwise as the client wrote it.

    Attributes:
        messages: OpenAI messages, at least one.
        tools: OpenAI tools the model is told of; None for none.
        template_kwargs: extra variables of the chat template.
        chat_template: template to use instead of the model's own; empty for the model's own.
        add_generation_prompt: end with the opening of the assistant's turn; None means yes, unless the final message is
            continued.
        continue_final_message: leave the last message open so that the model continues it.
        documents: for retrieval templates; None for none.
        tool_choice: OpenAI tool_choice; None when unset.
    """

    messages: list[Message]
    tools: list[Tool] | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    chat_template: str = ""
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    documents: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None

    @property
    def prompt_tools(self) -> list[Tool] | None:
        """The tools that belong into the prompt: with tool_choice "none" the model must not see any."""
        return self.tools if self.tool_choice != "none" else None


@dataclass(frozen=True)
class TokenizerFacts:
    """What is constant about a loaded tokenizer.

    Attributes:
        processor: implementation, such as "hf".
        fingerprint: sha-256, hex, over the tokenizer's files; equal fingerprints mean equal ids.
        vocab_size: ids are below this.
        eos_ids: the model's end-of-sequence ids.
        stop_ids: ids that end a turn besides those.
        context_length: most tokens of prompt and output together as the model's files say; 0 for unknown.
        has_chat_template: chat requests work without a template of their own.
        template_fingerprint: sha-256, hex, of the chat template; empty for none.
        backend: library that turns text into ids; empty for the implementation's own.
        prompt_fingerprint: what becomes of a fixed set of chats, see `probes`; empty until the tokenizer is served.
        defaults: what the model's files recommend for whatever a client leaves unset.
        cache_refusal: why prompts' segments are not remembered; empty when they are, or when there is no such cache.
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
    defaults: GenerationDefaults = NO_DEFAULTS


def packed_chat(tokenizer: TokenizerProtocol, chat: ChatRequest) -> bytes:
    """Packed ids of a chat; of a user's class that knows nothing of packing as well."""
    pack = getattr(tokenizer, "pack_chat", None)
    return pack(chat) if pack is not None else pack_u32(tokenizer.encode_chat(chat))


def packed_text(tokenizer: TokenizerProtocol, text: str, add_special_tokens: bool | None) -> bytes:
    """Packed ids of a text; of a user's class that knows nothing of packing as well."""
    pack = getattr(tokenizer, "pack_text", None)
    return (
        pack(text, add_special_tokens)
        if pack is not None
        else pack_u32(tokenizer.encode_text(text, add_special_tokens))
    )


@dataclass(frozen=True)
class PendingPrompt:
    """A chat whose template runs in another process.

    Attributes:
        render: begins to render it; to be awaited on the event loop.
        finish: makes the prompt of what the template made.
    """

    render: Callable[[], Awaitable[str]]
    finish: Callable[[str], str]

    async def text(self) -> str:
        """The prompt; SluiceError as TokenizerProtocol.render."""
        return self.finish(await self.render())


class TokenizerProtocol(Protocol):
    """Turns requests into token ids and ids into text. Called from several threads at once; never awaits.

    Every method raises SluiceError(INVALID_ARGUMENT) naming the request's field when the request can never work.

    Attributes:
        blocks: the methods wait for something else than this thread's computing, so they are kept off the event loop.
        renders_apart: the model's own template runs in another process, so chats begin with `begin_chat`.
    """

    blocks: ClassVar[bool] = False
    renders_apart: bool = False
    facts: TokenizerFacts

    @property
    def cache_stats(self) -> CacheStats | None:
        """Of the cache of prompts' segments; None without one."""
        return None

    def pack_chat(self, chat: ChatRequest) -> bytes:
        """The same as `encode_chat`, packed u32: what is packed already need not become Python integers."""
        return pack_u32(self.encode_chat(chat))

    def pack_text(self, text: str, add_special_tokens: bool | None = None) -> bytes:
        """The same as `encode_text`, packed u32."""
        return pack_u32(self.encode_text(text, add_special_tokens))

    def begin_chat(self, chat: ChatRequest) -> PendingPrompt | None:
        """The chat's prompt, where an event loop can wait for it; None where `pack_chat` computes it at once.

        Its ids are those of `pack_text` without special tokens.
        """
        return None

    def encode_chat(self, chat: ChatRequest) -> list[int]:
        """Ids of a chat's prompt: the ids of `render`, with control tokens only where the template put them."""
        ...

    def render(self, chat: ChatRequest) -> str:
        """The prompt as text, control tokens spelled out."""
        ...

    def encode_text(self, text: str, add_special_tokens: bool | None = None) -> list[int]:
        """Ids of plain text; None adds what the model's tokenizer adds by default."""
        ...

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Text of ids below `facts.vocab_size`; bytes that are no UTF-8 become U+FFFD."""
        ...

    def tokenize(self, messages: list[Message], model: str, tools: list[Tool] | None = None) -> list[int]:
        """Ids of a plain chat; `model` is the served name, for implementations that hold several."""
        return self.encode_chat(ChatRequest(messages, tools))
