"""The HTTP API of an SGLang server: tokens in and tokens out by its native /generate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from services.common.base.errors import ErrorKind, SluiceError, internal
from services.worker.contract.capabilities import GUIDED, Capability
from services.worker.contract.engine import Load, Sink
from services.worker.contract.generation import GenerateRequest
from services.worker.engines.http.client import HttpClient, error_of
from services.worker.engines.http.dialect import (
    MAX_RANKS,
    Description,
    Dialect,
    GenerateCall,
    Publisher,
    incomplete,
)
from services.worker.engines.http.metrics import whole
from services.worker.engines.shared.sglang_request_state import RequestState
from services.worker.engines.shared.sglang_sampling import CAPABILITIES as IN_PROCESS
from services.worker.engines.shared.sglang_sampling import Facts, engine_request

CAPABILITIES = IN_PROCESS - {
    Capability.EMBEDDINGS,
    Capability.IMAGE,
    Capability.LORA,
    Capability.LORA_LOADING,
    Capability.PREFILL,
    Capability.DECODE,
    Capability.PROFILE,
    Capability.SLEEP,
}

_MODEL_INFO = ("/model_info", "/get_model_info")
_SERVER_INFO = ("/server_info", "/get_server_info")
"""Paths of current servers, and of older ones."""
_LOADS = "/v1/loads?include=core"


class SglangDialect(Dialect):
    """Uses /generate with token ids."""

    NAME = "sglang-http"
    ALIVE = "/model_info"
    COUNTS_COPIES = False

    def __init__(self) -> None:
        self._facts = Facts(0)
        self._page = 1

    async def describe(self, client: HttpClient) -> Description:
        model = await _first(client, _MODEL_INFO)
        info = await _first(client, _SERVER_INFO)
        if not model.get("is_generation", True):
            raise SluiceError(
                ErrorKind.FAILED_PRECONDITION, "SGLang's server generates no text; the http engine needs that."
            )
        if info.get("disaggregation_mode", "null") != "null":
            raise SluiceError(
                ErrorKind.FAILED_PRECONDITION,
                "SGLang's server serves only part of each request; the http engine needs one without "
                "--disaggregation-mode.",
            )
        cards = (await client.get_json("/v1/models"))["data"]
        length = min(int(cards[0].get("max_model_len") or 0), int(info.get("max_req_input_len") or 1 << 40) + 1)
        if not length:
            raise internal("SGLang's server lists no model with a context length at /v1/models.")
        self._page = int(info.get("page_size") or 0)
        self._facts = Facts(
            context_length=length,
            has_priorities=bool(info.get("enable_priority_scheduling")),
            low_first=bool(info.get("schedule_low_priority_values_first")),
            has_seeds=bool(info.get("enable_deterministic_inference")),
        )
        supported = capabilities(info)
        return Description(
            version=str(info.get("version") or ""),
            model=str(model.get("served_model_name") or cards[0]["id"]),
            source=str(model.get("tokenizer_path") or model["model_path"]),
            context_length=length,
            block_size=self._page,
            total_blocks=int(info.get("max_total_num_tokens") or 0) // self._page if self._page else 0,
            max_sequences=int(info.get("max_running_requests") or 0),
            ranks=max(int(info.get("dp_size") or 1), 1),
            capabilities=supported,
            accepted=frozenset({Capability.SEED} - supported),
            publishers=publishers(info.get("kv_events")),
        )

    def call(self, request: GenerateRequest, request_id: str) -> GenerateCall:
        return GenerateCall("/generate", engine_request(request, request_id, self._facts))

    def reader(self, request: GenerateRequest, sink: Sink) -> SglangReader:
        return SglangReader(request, "", sink)

    async def loads(self, client: HttpClient) -> Sequence[Load]:
        try:
            reported = (await client.get_json(_LOADS))["loads"]
        except SluiceError as error:
            if error.kind is ErrorKind.NOT_FOUND:
                return ()
            raise
        return [
            Load(
                running_requests=whole(load.get("num_running_reqs")),
                waiting_requests=whole(load.get("num_waiting_reqs")),
                used_blocks=whole(load.get("num_used_tokens")) // max(self._page, 1),
                prefill_tokens=whole(load.get("num_waiting_uncached_tokens")),
            )
            for load in sorted(reported, key=lambda load: int(load.get("dp_rank") or 0))
        ]

    async def clear_cache(self, client: HttpClient) -> None:
        try:
            await client.post("/flush_cache")
        except SluiceError as error:
            if error.kind is not ErrorKind.INVALID_ARGUMENT:
                raise
            raise SluiceError(
                ErrorKind.FAILED_PRECONDITION,
                "SGLang cannot clear its cache while requests are running.",
                code="cache_in_use",
            ) from error

    async def abort(self, client: HttpClient, request_id: str) -> None:
        # SGLang itself waits two seconds after a disconnection.
        await client.post("/abort_request", {"rid": request_id})


class SglangReader(RequestState):
    """Reads the chunks of one generation, and the errors in its stream; the usage comes with the last tokens."""

    @property
    def finishing(self) -> bool:
        """Never, as nothing follows the last tokens."""
        return False

    def take(self, chunk: Mapping[str, Any]) -> None:
        """Processes one chunk."""
        if "error" in chunk:
            error = chunk["error"]
            raise error_of(int(error.get("code") or 500), str(error.get("message") or ""))
        super().take(chunk)

    def close(self) -> None:
        """Raises SluiceError when the generation has not finished."""
        if not self.ended:
            raise incomplete()


def capabilities(info: Mapping[str, Any]) -> frozenset[Capability]:
    """Returns the capabilities of a server from its /server_info."""
    missing: set[Capability] = set()
    if info.get("skip_tokenizer_init"):
        missing |= GUIDED | {Capability.MIN_TOKENS}
    if info.get("grammar_backend") == "none":
        missing |= GUIDED
    if not info.get("enable_priority_scheduling"):
        missing.add(Capability.PRIORITY)
    if not info.get("enable_deterministic_inference"):
        missing.add(Capability.SEED)
    if not info.get("enable_strict_thinking"):
        missing.add(Capability.THINKING_TOKEN_BUDGET)
    if int(info.get("dp_size") or 1) < 2:
        missing.add(Capability.DATA_PARALLEL_RANK)
    if info.get("disable_radix_cache"):
        missing.add(Capability.KV_EVENTS)
    return CAPABILITIES - missing


def publishers(described: Mapping[str, Any] | None) -> tuple[Publisher, ...]:
    """Returns the publishers by rank from the `kv_events` of /server_info."""
    if not described or described.get("publisher") != "zmq":
        return ()
    host, base = described["endpoint_host"], int(described["endpoint_port_base"])
    replay = described.get("replay_endpoint_port_base")
    return tuple(
        Publisher(
            rank,
            f"tcp://{host}:{base + rank}",
            "" if replay is None else f"tcp://{host}:{int(replay) + rank}",
            str(described.get("topic") or ""),
        )
        for rank in range(min(int(described.get("dp_size") or 1), MAX_RANKS))
    )


async def _first(client: HttpClient, paths: Sequence[str]) -> Mapping[str, Any]:
    """Returns the JSON object at the first of these paths that the server has."""
    for path in paths:
        try:
            found: Mapping[str, Any] = await client.get_json(path)
        except SluiceError as error:
            if error.kind is not ErrorKind.NOT_FOUND or path == paths[-1]:
                raise
        else:
            return found
    raise internal("The server reports nothing about itself.")
