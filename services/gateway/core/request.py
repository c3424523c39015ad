"""The gateway's own words for a generation; no HTTP, no gRPC."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any, Literal, Protocol, cast

from services.common.errors import ErrorKind, SluiceError
from services.gateway.core.routing_hints import NO_HINTS, RoutingHints

BYTES_PER_TOKEN = 4
"""The estimate for prompts whose token ids are not known yet."""


class FinishReason(IntEnum):
    """The numbers of `sluice.v1.FinishReason`."""

    STOP = 1
    LENGTH = 2
    TOOL_CALLS = 3
    CANCELLED = 4
    ERROR = 5
    HANDOFF = 6

    @classmethod
    def of(cls, number: int) -> FinishReason:
        """Returns the reason of a number that a peer sent.

        Raises:
            SluiceError: `INTERNAL`, for a number that this version does not define.
        """
        try:
            return cls(number)
        except ValueError:
            raise SluiceError(
                ErrorKind.INTERNAL, f"The stream ended for a reason that this version does not define ({number})."
            ) from None


class Role(IntEnum):
    """The part a worker plays; the numbers of `sluice.v1.WorkerRole`."""

    AGGREGATED = 1
    PREFILL = 2
    DECODE = 3


@dataclass(frozen=True, slots=True)
class DisaggregationPart:
    """What one worker of a pair is told: its part and, for the second one, what the first handed over."""

    role: Role
    handoff: bytes = b""


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation, as the JSON the client sent."""

    messages_json: bytes
    tools_json: bytes = b""
    tool_choice_json: bytes = b""
    template_kwargs_json: bytes = b""
    chat_template: str = ""
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    documents_json: bytes = b""


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Plain text."""

    text: str
    add_special_tokens: bool | None = None


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Token ids, packed u32."""

    token_ids: bytes


@dataclass(frozen=True, slots=True)
class EmbedsPrompt:
    """Input embeddings in place of ids: little-endian float32, one row of `width` per position."""

    values: bytes
    width: int

    @property
    def length(self) -> int:
        """Positions."""
        return len(self.values) // (4 * self.width)


Prompt = ChatPrompt | TextPrompt | TokenPrompt | EmbedsPrompt


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen; None leaves it to the engine."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    logit_bias: dict[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    thinking_token_budget: int | None = None
    engine_options: Mapping[str, Any] = field(default_factory=dict)

    def or_else(self, defaults: SamplingParams) -> SamplingParams:
        """The same, with what is None taken from `defaults`."""
        unset = {
            name: value
            for name in DEFAULTED
            if getattr(self, name) is None and (value := getattr(defaults, name)) is not None
        }
        return replace(self, **unset) if unset else self


DEFAULTED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""What a model's files may recommend."""


@dataclass(frozen=True, slots=True)
class StopParams:
    """When a generation ends; `max_tokens` None is what fits into the context."""

    max_tokens: int | None = None
    min_tokens: int = 0
    strings: tuple[str, ...] = ()
    token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_string: bool = False


@dataclass(frozen=True, slots=True)
class Parsing:
    """How the answer is taken apart; `auto` is what the model needs, empty is not at all."""

    tool_parser: str = ""
    reasoning_parser: str = ""
    tools_json: bytes = b""
    tool_choice_json: bytes = b""
    single_tool_call: bool = False
    drop_reasoning: bool = False  # the client does not want to hear it
    template_kwargs_json: bytes = b""  # what the chat template was told: some models only think when that says so


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """A constraint on the output: choices are a tuple, the other kinds a text (a JSON document for the JSON kinds)."""

    kind: Literal["json_schema", "regex", "ebnf", "choice", "json_object", "structural_tag"]
    grammar: str | tuple[str, ...] = ""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt and how to continue it, `choices` times.

    `logprobs` and `prompt_logprobs` count the alternatives per token: 0 is the token itself only, None is none at all.
    `needs` are the capabilities that an engine must have for this, each with the client's field that asks for it; empty
    where the gateway itself does.
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
    guided_calls: bool = False  # what the constraint asks for is a tool call, not an answer
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    token_texts: bool = False  # the sinks hear what each token stands for
    needs: tuple[tuple[str, str], ...] = ()
    hints: RoutingHints = NO_HINTS
    engine_text: bool = False  # the worker makes the text
    session_id: str = ""  # requests of one session go to one worker; as `sessions.current`


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """What preprocess made of a prompt; ids and hashes are packed."""

    token_ids: bytes
    block_hashes: bytes
    hash_scheme: str
    stop_token_ids: bytes
    eos_token_ids: bytes
    context_length: int
    prompt_tail: bytes
    defaults: SamplingParams = SamplingParams()
    default_max_tokens: int | None = None
    embeds: EmbedsPrompt | None = None  # in place of ids
    raw: ChatPrompt | TextPrompt | None = None  # the worker makes the ids and says them with its first delta

    @property
    def known(self) -> bool:
        """It is made of ids, and they are here."""
        return self.raw is None and self.embeds is None

    @property
    def length(self) -> int:
        """Tokens of the prompt; 0 as long as only the worker could know."""
        return len(self.token_ids) // 4 if self.embeds is None else self.embeds.length

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
    """What the router thought of one worker; everything is in blocks, the lowest cost won.

    Attributes:
        overlap: of the prompt, held there as a prefix, by tier: device, host, disk.
        predicted: blocks nobody reported but the router expects there.
        prefill: outstanding prefill booked on it.
        decode: booked on it for decoding.
    """

    worker: str
    rank: int
    cost: float
    overlap: tuple[int, int, int]
    predicted: int
    prefill: float
    decode: float


@dataclass(frozen=True, slots=True)
class Route:
    """Where a generation goes.

    Attributes:
        worker_id: who answers; of a pair, the decode worker.
        rank: of its data-parallel ranks; None: it chooses. The same of `prefill_rank`.
        reservation_id: of all that is booked; empty when nothing is.
        prefill_worker_id: who computes the prompt for it; empty: the worker does all.
        prefill_skipped: why there is no prefill worker although there are some, in the router's word.
        tokens_to_compute: of the prompt, as far as the router knows caches.
        headers: of an answer that books nothing, for the schedulers that route by header.
        split_skipped: why one worker does what was meant for two, as a `degraded` mark.
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
    scores: tuple[Score, ...] = ()  # only where they were asked for


@dataclass(frozen=True, slots=True)
class Finish:
    """How one choice ended; `stop_token_id` is told to sinks only where the client asked for that id to end it."""

    reason: FinishReason
    stop_string: str = ""
    stop_token_id: int | None = None
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    degraded: tuple[str, ...] = ()
    migrations: int = 0


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token with the natural logarithm of its probability."""

    token_id: int
    logprob: float
    rank: int = 0


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """Log-probabilities at one position; `top` has the most likely first."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...] = ()


class Sink(Protocol):
    """Takes what one choice says; called on the event loop, must not block.

    `finish` or `fail` is called exactly once, and nothing after it.
    """

    def logprobs(self, positions: Sequence[PositionLogprobs]) -> None:
        """The next tokens' log-probabilities, before what the tokens stand for; only when asked for."""

    def prompt_logprobs(self, positions: Sequence[PositionLogprobs]) -> None:
        """The prompt's log-probabilities, once, before anything else; only when asked for."""

    def tokens(self, pieces: Sequence[bytes], offsets: Sequence[int]) -> None:
        """What the next tokens stand for, before their text, and where it begins; only when asked for."""

    def text(self, piece: str) -> None: ...

    def reasoning(self, piece: str) -> None:
        """The next text of the model's thinking."""

    def tool_call(self, call: int, call_id: str, name: str, arguments: str) -> None:
        """The next piece of call number `call`; id and name come with its first piece only."""

    def finish(self, finish: Finish) -> None: ...

    def fail(self, error: SluiceError) -> None: ...


class _NullSink:
    """Takes everything and keeps nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return _nothing


def _nothing(*_said: object) -> None:
    pass


NULL_SINK = cast(Sink, _NullSink())
"""The sink of a choice that is over."""
