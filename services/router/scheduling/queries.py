"""Queries to the router and the routes it returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import islice
from operator import attrgetter
from typing import Any

from services.common.base.errors import check_name, invalid
from services.common.observability.receipts import reason_of
from services.common.types.media.spans import MediaSpan
from services.router.scheduling.request_bodies import AnyBody
from services.router.state.kv_index.index import Overlap
from services.router.state.reservations.cost import CostModel, Load
from services.router.state.workers.worker import Role, Worker, WorkerRank

MAX_TOKENS = 1 << 24
"""Tokens of a prompt or output that a query names; more are refused with INVALID_ARGUMENT."""
MAX_MS = 24 * 3600 * 1000
"""Milliseconds of any time that a query names; more, than a day, are refused with INVALID_ARGUMENT."""
MAX_HEADERS = 64
"""Headers of a query; more are refused with INVALID_ARGUMENT, at the HTTP twin and the picker left out."""
MAX_HEADER = 4096
"""Characters of a header's name and value; a longer header is refused, at the HTTP twin and the picker left out."""
MAX_NAME = 512
"""Characters of the name of a request, session or owner; a longer one is refused with INVALID_ARGUMENT."""
SECRET_HEADERS = frozenset({"authorization", "cookie", "x-api-key", "proxy-authorization"})


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as token ids (packed u32), block hashes (packed u64) or an OpenAI body (JSON).

    If all are empty, only the length is known. A body must be tokenized first; the prompt then has token ids and
    hashes. `body` is a body that has been read already. `media` are the media items of the token ids or hashes.
    """

    token_ids: bytes = b""
    block_hashes: bytes = b""
    hash_scheme: str = ""
    block_size: int = 0
    prompt_tokens: int = 0
    lora: str = ""
    cache_salt: str = ""
    openai_body: bytes = b""
    body: AnyBody | None = None
    media: tuple[MediaSpan, ...] = ()

    @property
    def size(self) -> int:
        """Bytes that the prompt takes up, about."""
        parsed = 0 if self.body is None else self.body.size
        return len(self.token_ids) + len(self.block_hashes) + len(self.openai_body) + parsed


@dataclass(frozen=True, slots=True)
class Query:
    """Query for a worker to run a prompt. `request_id` is set to make a reservation; `candidates` None: any worker.

    `request_id` and `owner` are names within `scope`; see `reservations.ids.scoped`.

    Attributes:
        deadline_unix_ms: when the first token is due; orders the admission queue; 0: no deadline.
        fairness_id: caller among whose requests the admission queue shares places evenly.
        tokenize_ms: route by load alone if tokenizing takes longer or fails; 0: wait, and fail.
        fallbacks: number of further workers to return, cheapest first.
        return_hashes: return the block hashes of the prompt, without its token ids.
        role: half of the request to select a worker for, or AGGREGATED for one worker alone; None: as decided here.
        require_pair: fail rather than select one worker for the whole request.
        bypass_uncached_tokens: in place of the setting of the same name; 0: the setting.
    """

    model: str
    prompt: Prompt
    cost: CostModel
    request_id: str = ""
    policy: str = ""
    candidates: frozenset[str] | None = None
    expected_output_tokens: int = 0
    ttl_ms: int = 0
    explain: bool = False
    owner: str = ""
    priority: int = 0
    session_id: str = ""
    session_ttl_ms: int = 0
    max_wait_ms: int = 0
    return_token_ids: bool = False
    scope: str = ""
    max_wait_for_workers_ms: int = 0
    deadline_unix_ms: int = 0
    fairness_id: str = ""
    tokenize_ms: int = 0
    fallbacks: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)
    return_hashes: bool = False
    role: Role | None = None
    require_pair: bool = False
    bypass_uncached_tokens: int = 0

    def with_prompt(self, prompt: Prompt) -> Query:
        """Returns the query with another prompt; `dataclasses.replace` looks up each of its many fields by itself."""
        model, _, *others = _fields(self)
        return Query(model, prompt, *others)


_fields = attrgetter(*(field.name for field in fields(Query)))


@dataclass(frozen=True, slots=True)
class Score:
    """Cost, overlap and load of a candidate, for explanations; `policy_score` is that of a composed policy."""

    slot: WorkerRank
    cost: float
    overlap: Overlap
    load: Load
    policy_score: float | None = None


@dataclass(frozen=True, slots=True)
class PrefixPeer:
    """A rank that holds more of a prompt than the worker that computes it."""

    worker: Worker
    rank: int
    blocks: int


@dataclass(frozen=True, slots=True)
class RouteResult:
    """Result of a query. `reservation_id` is empty and `expires_unix_ms` 0 without a reservation.

    Attributes:
        worker: generates the output, and runs the prompt unless `prefill_worker` is set.
        overlap: with the worker that runs the prompt.
        repeated: the request had a reservation before.
        seconds: duration of the decision.
        prompt: with the block hashes by which it was routed, if the query requests it.
        fallbacks: further workers for the part that generates the output, cheapest first.
        peer: set if another rank holds at least one block more of the prompt than the worker that runs it.
        half: part of the request for which `worker` was selected, if only one half was asked for.
    """

    worker: Worker
    rank: int
    overlap: Overlap
    best_overlap_blocks: int
    tokens_to_compute: int
    index_age_ms: int
    reservation_id: str = ""
    expires_unix_ms: int = 0
    degraded: str = ""
    scores: list[Score] = field(default_factory=list)
    prefill_worker: Worker | None = None
    prefill_rank: int = 0
    prefill_skipped: str = ""
    session_hit: bool = False
    waited_ms: int = 0
    policy: str = ""
    prompt_tokens: int = 0
    prompt_blocks: int = 0
    block_size: int = 1
    repeated: bool = False
    seconds: float = 0.0
    stages: Mapping[str, float] = field(default_factory=dict)
    prompt: Prompt | None = None
    fallbacks: Sequence[Worker] = ()
    peer: PrefixPeer | None = None
    half: Role | None = None

    @property
    def predicted_cached_tokens(self) -> int:
        """Prompt tokens expected in the cache of the worker that runs the prompt."""
        return (self.overlap.blocks + self.overlap.predicted) * self.block_size

    @property
    def best_cached_tokens(self) -> int:
        """Most prompt tokens that any candidate is expected to have cached."""
        return max(self.best_overlap_blocks * self.block_size, self.predicted_cached_tokens)

    @property
    def receipt(self) -> dict[str, Any]:
        """The route receipt, before the worker has delivered anything."""
        predicted, available = self.predicted_cached_tokens, self.best_cached_tokens
        receipt = {
            "worker": self.worker.worker_id,
            "rank": self.rank,
            "prompt_tokens": self.prompt_tokens,
            "predicted_cached_tokens": min(predicted, self.prompt_tokens),
            "available_cached_tokens": min(available, self.prompt_tokens),
            "waited_ms": self.waited_ms,
            "reason": reason_of(self.degraded, self.policy, self.session_hit, predicted, available),
        }
        return receipt | ({"prefill_worker": self.prefill_worker.worker_id} if self.prefill_worker else {})


_TIMES = ("ttl_ms", "session_ttl_ms", "max_wait_ms", "max_wait_for_workers_ms")
_NAMES = ("request_id", "session_id", "fairness_id")
_times, _names = attrgetter(*_TIMES), attrgetter(*_NAMES)


def check_tokens(name: str, tokens: int) -> None:
    """Raises SluiceError (INVALID_ARGUMENT) for a length that no model supports."""
    if tokens > MAX_TOKENS:
        raise invalid(f"{name} is {tokens}; the maximum is {MAX_TOKENS}.", param=name)


def check(query: Query) -> None:
    """Raises SluiceError (INVALID_ARGUMENT) that names the first field out of bounds."""
    check_tokens("prompt.prompt_tokens", query.prompt.prompt_tokens)
    check_tokens("expected_output_tokens", query.expected_output_tokens)
    for name, milliseconds in zip(_TIMES, _times(query), strict=True):
        if milliseconds > MAX_MS:
            raise invalid(f"{name} is {milliseconds}; the maximum is one day, {MAX_MS}.", param=name)
    for name, text in zip(_NAMES, _names(query), strict=True):
        if len(text) > MAX_NAME:
            raise invalid(f"{name} has {len(text)} characters; the maximum is {MAX_NAME}.", param=name)
    if query.owner:
        check_owner(query.owner)
    if query.headers:
        _check_headers(query.headers)


def _check_headers(headers: Mapping[str, str]) -> None:
    if len(headers) > MAX_HEADERS:
        raise invalid(f"headers has {len(headers)} entries; the maximum is {MAX_HEADERS}.", param="headers")
    for name, value in headers.items():
        if len(name) + len(value) > MAX_HEADER:
            raise invalid(
                f"A header of headers has {len(name) + len(value)} characters; the maximum is {MAX_HEADER}.",
                param="headers",
            )


def for_policies(headers: Mapping[str, str]) -> dict[str, str]:
    """Returns the headers of a client that policies may read: no credentials, and no more than a query may have."""
    shown = (
        (name, value)
        for name, value in headers.items()
        if name not in SECRET_HEADERS and len(name) + len(value) <= MAX_HEADER
    )
    return dict(islice(shown, MAX_HEADERS))


def check_owner(owner: str) -> None:
    """Raises SluiceError (INVALID_ARGUMENT) for an owner name that is too long or not printable."""
    check_name(owner, "owner", MAX_NAME)
