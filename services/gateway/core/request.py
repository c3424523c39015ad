"""The gateway's data model of a generation, independent of HTTP and gRPC."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

from services.common.apis.prompts import ChatPrompt as ChatPrompt
from services.common.apis.prompts import TextPrompt as TextPrompt
from services.common.apis.prompts import TokenPrompt as TokenPrompt
from services.common.base.errors import SluiceError
from services.common.observability.receipts import reason_of
from services.common.types.generation import FinishReason as FinishReason
from services.common.types.generation import PositionLogprobs as PositionLogprobs
from services.common.types.generation import PromptEmbeds
from services.common.types.generation import Role as Role
from services.common.types.generation import TokenLogprob as TokenLogprob
from services.common.types.media.spans import MediaItem
from services.common.types.sampling import UNSET
from services.common.types.sampling import SamplingParams as SamplingParams
from services.common.types.sampling import StructuredOutput as StructuredOutput
from services.gateway.core.routing_hints import NO_HINTS, RoutingHints

BYTES_PER_TOKEN = 4
"""The estimate for prompts whose token ids are not known yet."""


@dataclass(frozen=True, slots=True)
class DisaggregationPart:
    """The role of one worker of a pair and, for the decode worker, the handoff of the prefill worker."""

    role: Role
    handoff: bytes = b""


EmbedsPrompt = PromptEmbeds
PromptMedia = MediaItem
Prompt = ChatPrompt | TextPrompt | TokenPrompt | EmbedsPrompt


@dataclass(frozen=True, slots=True)
class StopParams:
    """Stop conditions of a generation; `max_tokens` None means up to the context length."""

    max_tokens: int | None = None
    min_tokens: int = 0
    strings: tuple[str, ...] = ()
    token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_string: bool = False


@dataclass(frozen=True, slots=True)
class Parsing:
    """Parsers for tool calls and reasoning; `auto` selects by model, empty selects none."""

    tool_parser: str = ""
    reasoning_parser: str = ""
    tools_json: bytes = b""
    tool_choice_json: bytes = b""
    single_tool_call: bool = False
    drop_reasoning: bool = False  # the client does not want reasoning in the response
    template_kwargs_json: bytes = b""  # arguments of the chat template: they may switch reasoning on


@dataclass(frozen=True, slots=True, weakref_slot=True)
class GenerationRequest:
    """One prompt and the parameters for generating `choices` continuations.

    `logprobs` and `prompt_logprobs` are the number of alternatives per token: 0 returns the token itself only, None
    returns no log-probabilities. `needs` are the capabilities an engine must have, each with the request field that
    requires it; the field is empty where the gateway itself requires the capability.
    """

    request_id: str
    model: str
    prompt: Prompt
    choices: int
    sampling: SamplingParams
    stop: StopParams
    skip_special_tokens: bool = True
    parsing: Parsing | None = None
    priority: int = 0
    lora: str = ""
    cache_salt: str = ""
    guided: StructuredOutput | None = None
    guided_calls: bool = False  # the constraint describes a tool call, not content
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    token_texts: bool = False  # the sinks receive the bytes of each token
    needs: tuple[tuple[str, str], ...] = ()
    hints: RoutingHints = NO_HINTS
    engine_text: bool = False  # the worker's engine detokenizes
    text_only: bool = False  # the engine takes and returns text, never token ids
    session_id: str = ""  # as `session_affinity.current`
    degraded: tuple[str, ...] = ()  # what the answer lacks for reasons known before it starts
    template_fields: tuple[tuple[str, str], ...] = ()  # arguments of the chat template and the fields that set them

    def fields_without_effect(self, arguments: Collection[str]) -> list[str]:
        """Returns the client's fields all of whose arguments of the chat template are among those given."""
        names = dict.fromkeys(name for _, name in self.template_fields)
        effective = {name for argument, name in self.template_fields if argument not in arguments}
        return [name for name in names if name not in effective]


def no_effect(field: str) -> str:
    """Returns the reason in `degraded` for a field of the request that has no effect."""
    return f"no_effect:{field}"


def left_out(kind: str) -> str:
    """Returns the reason in `degraded` for a part of the request, such as a hosted tool, that is left out."""
    return f"left_out:{kind}"


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """A tokenized prompt; ids and block hashes are packed."""

    token_ids: bytes
    block_hashes: bytes
    hash_scheme: str
    stop_token_ids: bytes
    eos_token_ids: bytes
    context_length: int
    prompt_tail: bytes
    defaults: SamplingParams = UNSET
    default_max_tokens: int | None = None
    embeds: EmbedsPrompt | None = None  # in place of ids
    raw: ChatPrompt | TextPrompt | None = None  # the worker tokenizes it and returns the ids with its first delta
    without_effect: tuple[str, ...] = ()  # arguments of the chat template that the model's template does not have
    notes: tuple[str, ...] = ()  # what the prompt shows in another place or form than the client's messages
    second_text_at: int = 0  # of a pair of texts: index of the first token of the second one
    media: tuple[PromptMedia, ...] = ()
    thinking: bool = False  # the prompt ends inside a thought of the message that the model continues
    counted: int = 0  # tokens of a raw prompt as the engine counted them, where it returns no ids
    length: int = field(init=False)  # tokens; 0 until the worker has tokenized, or counted, a raw prompt

    def __post_init__(self) -> None:
        length = self.counted or len(self.token_ids) // 4 if self.embeds is None else self.embeds.length
        object.__setattr__(self, "length", length)  # the class is frozen

    @property
    def has_token_ids(self) -> bool:
        """Whether the prompt consists of token ids that the gateway has."""
        return self.raw is None and self.embeds is None

    def context_limit(self, worker_limit: int) -> int:
        """Returns the smaller of the context lengths known to the worker and to preprocess; 0 if both are unknown."""
        return min((limit for limit in (worker_limit, self.context_length) if limit), default=0)

    @property
    def estimated_length(self) -> int:
        """Tokens of the prompt; estimated from its bytes where the engine makes the token ids."""
        if self.raw is None:
            return self.length
        raw = self.raw
        size = len(raw.text.encode()) if isinstance(raw, TextPrompt) else len(raw.messages_json) + len(raw.tools_json)
        return max(size // BYTES_PER_TOKEN, 1)


@dataclass(frozen=True, slots=True)
class Score:
    """The router's score of one worker, in blocks; the lowest cost wins.

    Attributes:
        overlap: prefix blocks of the prompt cached there, by tier: device, host, disk.
        predicted: blocks that the router expects there without a report of the worker.
        prefill: outstanding prefill blocks reserved on the worker.
        decode: decode blocks reserved on the worker.
    """

    worker: str
    rank: int
    cost: float
    overlap: tuple[int, int, int]
    predicted: int
    prefill: float
    decode: float


class Reservations(Protocol):
    """Receives the progress of the requests for which it reserved capacity. Its methods must not block."""

    def prefill_complete(self, reservation_id: str) -> None:
        """Notes that the prompt of a request is computed. Called at most once per reservation."""

    def free(self, reservation_id: str, cached_tokens: int | None = None, output_tokens: int = 0) -> None:
        """Releases a reservation, whose request has ended or never started. Called exactly once per reservation.

        Args:
            cached_tokens: prompt tokens that were cached; None: the prompt was not computed.
        """


@dataclass(frozen=True, slots=True)
class Route:
    """The workers chosen for a generation.

    Attributes:
        worker_id: the worker; of a pair, the decode worker.
        rank: its data-parallel rank; None: the worker chooses. `prefill_rank` likewise.
        reservation_id: the reservation for all workers of the route; empty without one.
        reservations: what made the reservation and receives its outcome; None: the gateway's router.
        degraded: the fallback that produced this route; empty: none.
        prefill_worker_id: the prefill worker; empty: one worker runs prefill and decode.
        prefill_skipped: the router's reason for choosing no prefill worker although the model has some.
        split_skipped: why one worker runs a request intended for a pair, as a `degraded` reason.
        tokens_to_compute: uncached prompt tokens, as estimated by the router.
        headers: response headers for query-only requests, for schedulers that route by header.
        predicted_cached_tokens: prompt tokens that the router expects in the cache of the worker.
        best_cached_tokens: most prompt tokens that any candidate is expected to have cached.
        policy: routing policy that chose; empty: the request named the worker.
        session_hit: whether the worker of the session's last request was chosen.
        waited_ms: time in the router's admission queue.
    """

    worker_id: str
    rank: int | None = None
    reservation_id: str = ""
    degraded: str = ""
    prefill_worker_id: str = ""
    prefill_rank: int | None = None
    prefill_skipped: str = ""
    split_skipped: str = ""
    tokens_to_compute: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)
    scores: tuple[Score, ...] = ()  # only if requested
    predicted_cached_tokens: int = 0
    best_cached_tokens: int = 0
    policy: str = ""
    session_hit: bool = False
    waited_ms: int = 0
    reservations: Reservations | None = None

    @property
    def reason(self) -> str:
        """Why this worker: a word for receipts."""
        return reason_of(
            self.degraded, self.policy, self.session_hit, self.predicted_cached_tokens, self.best_cached_tokens
        )


@dataclass(frozen=True, slots=True)
class Finish:
    """The end of one choice; sinks receive `stop_token_id` only where the client requested that stop token.

    Attributes:
        receipt: its route receipt, if the request asks for one.
    """

    reason: FinishReason
    stop_string: str = ""
    stop_token_id: int | None = None
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    degraded: tuple[str, ...] = ()
    migrations: int = 0
    receipt: Mapping[str, Any] | None = None


class Sink(Protocol):
    """Receives the output of one choice; called on the event loop, must not block.

    Either `finish` or `fail` is called exactly once, as the last call.
    """

    def logprobs(self, positions: Sequence[PositionLogprobs]) -> None:
        """Receives the log-probabilities of the next tokens, before their bytes; only if requested."""

    def prompt_logprobs(self, positions: Sequence[PositionLogprobs]) -> None:
        """Receives the log-probabilities of the prompt, once, before everything else; only if requested."""

    def tokens(self, pieces: Sequence[bytes], offsets: Sequence[int]) -> None:
        """Receives the bytes of the next tokens and their offsets in the text, before the text; only if requested."""

    def text(self, piece: str) -> None: ...

    def reasoning(self, piece: str) -> None:
        """Receives the next reasoning text."""

    def tool_call(self, call: int, call_id: str, name: str, arguments: str) -> None:
        """Receives the next piece of the tool call with index `call`; only the first piece has id and name."""

    def finish(self, finish: Finish) -> None: ...

    def fail(self, error: SluiceError) -> None: ...


class _NullSink:
    """Discards everything."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return _discard


def _discard(*_output: object) -> None:
    pass


NULL_SINK = cast(Sink, _NullSink())
"""The sink of a choice that has ended."""
