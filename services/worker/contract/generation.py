"""Engine requests and results as plain data classes."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from services.common.base.errors import SluiceError
from services.common.types.generation import FinishReason as FinishReason
from services.common.types.generation import PositionLogprobs as PositionLogprobs
from services.common.types.generation import PromptEmbeds as PromptEmbeds
from services.common.types.generation import Role as Role
from services.common.types.generation import TokenLogprob as TokenLogprob
from services.common.types.media.spans import MediaFile as MediaFile
from services.common.types.media.spans import MediaItem as MediaItem
from services.common.types.media.spans import MediaKind as MediaKind
from services.common.types.media.spans import MediaSpan as MediaSpan
from services.common.types.sampling import UNSET
from services.common.types.sampling import SamplingParams as SamplingParams
from services.common.types.sampling import StructuredOutput as StructuredOutput
from services.worker.contract.text_delta import TextUpdate

if TYPE_CHECKING:
    from services.postprocess.detokenize.stream import StreamOptions


@dataclass(frozen=True, slots=True)
class StopParams:
    """Stop conditions of a generation.

    `stop_token_ids` include the model's end-of-sequence ids; `ignore_eos` disables those listed in `eos_token_ids`.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    eos_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class Disaggregation:
    """One worker's part of a request that is split into a prefill and a decode worker."""

    role: Role
    handoff: bytes = b""
    bootstrap_host: str = ""
    bootstrap_port: int = 0
    bootstrap_room: int = 0


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One generation. The prompt is `token_ids`, or with the matching capability `text`, `messages_json` or `embeds`.

    `resumed_tokens` is the number of trailing prompt tokens that another worker generated for the same request. `media`
    are the items that tokens of the prompt stand for, by offset.
    """

    request_id: str
    model: str
    token_ids: array[int] = field(default_factory=lambda: array("I"))
    text: str | None = None
    messages_json: bytes | None = None
    embeds: PromptEmbeds | None = None
    sampling: SamplingParams = UNSET
    stop: StopParams = StopParams()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    guided: StructuredOutput | None = None
    lora: str = ""
    cache_salt: str = ""
    priority: int = 0
    data_parallel_rank: int | None = None
    disaggregation: Disaggregation | None = None
    resumed_tokens: int = 0
    media: tuple[MediaItem, ...] = ()
    text_out: StreamOptions | None = None  # set when the worker also returns text, reasoning and tool calls


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one generation.

    Attributes:
        completion_tokens: generated tokens, including the end-of-sequence token.
        cached_tokens: prompt tokens found in the prefix cache; None: the engine does not report them.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int | None = 0


@dataclass(frozen=True, slots=True)
class Delta:
    """An increment of a generation's output.

    The first delta carries `cached_tokens`, or `cached_later` if only `usage` will have them; only the last one carries
    `finish_reason` and `usage`.
    """

    token_ids: Sequence[int] = ()
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    cached_tokens: int | None = None
    stop_token_id: int | None = None
    error: SluiceError | None = None
    logprobs: Sequence[PositionLogprobs] = ()
    prompt_logprobs: Sequence[PositionLogprobs] = ()
    handoff: bytes = b""
    prompt_token_ids: Sequence[int] = ()  # on the first delta, if the worker built the prompt
    text: TextUpdate | None = None
    cached_later: bool = False
