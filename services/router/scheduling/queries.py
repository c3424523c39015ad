"""What callers ask the router and what it answers, in plain words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from services.router.kv_index.index import Overlap
from services.router.reservations.cost import CostModel, Load
from services.router.workers.worker import Worker, WorkerRank


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt by its token ids (packed u32), its block hashes (packed u64) or an OpenAI body (JSON).

    All empty: by its length alone. A body has to be tokenized before anything else is done with it; it then has both
    ids and hashes.
    """

    token_ids: bytes = b""
    block_hashes: bytes = b""
    hash_scheme: str = ""
    block_size: int = 0
    prompt_tokens: int = 0
    lora: str = ""
    cache_salt: str = ""
    openai_body: bytes = b""


@dataclass(frozen=True, slots=True)
class Query:
    """Which worker should run this prompt? `request_id` is set to reserve, `candidates` None for any worker.

    `request_id` and `owner` are names within `scope`, see `reservations.scoped`.
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


@dataclass(frozen=True, slots=True)
class Score:
    """Why a candidate was chosen or not."""

    slot: WorkerRank
    cost: float
    overlap: Overlap
    load: Load


@dataclass(frozen=True, slots=True)
class RoutedPrompt:
    """A prompt as it was routed.

    Attributes:
        token_ids: packed u32; empty when only hashes or the length were given.
        block_hashes: packed u64, of the full blocks; empty without any.
        hash_scheme: of the hashes; empty without any.
        block_size: tokens a block; 0 without any.
    """

    token_ids: bytes = b""
    block_hashes: bytes = b""
    hash_scheme: str = ""
    block_size: int = 0


@dataclass(frozen=True, slots=True)
class Route:
    """The answer. `reservation_id` is empty and `expires_unix_ms` 0 when nothing was booked.

    `worker` answers; `prefill_worker` runs the prompt for it, None if it does so itself. `overlap` is on the one that
    runs the prompt. `repeated`: the request had been booked before. `seconds`: what the decision took. `prompt`: set
    where the query asks for it.
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
    prompt: RoutedPrompt | None = None
