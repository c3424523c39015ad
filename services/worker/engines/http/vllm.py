"""The HTTP API of `vllm serve`: tokens in and tokens out, by its generate endpoint or by its completions."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from services.common.base.errors import ErrorKind, SluiceError, internal
from services.worker.contract.capabilities import GUIDED, Capability
from services.worker.contract.engine import Load, Sink
from services.worker.contract.generation import FinishReason, GenerateRequest, PositionLogprobs, TokenLogprob
from services.worker.engines.http.answers import parse_object
from services.worker.engines.http.client import HttpClient, RequestFailedError, error_of
from services.worker.engines.http.dialect import Description, Dialect, GenerateCall, Publisher, incomplete
from services.worker.engines.http.metrics import read_cache_configs, read_loads
from services.worker.engines.inprocess.request_state import LOWEST_LOGPROB, InflightState
from services.worker.engines.inprocess.sampling import Facts, sampling_of
from services.worker.engines.vllm.fields import FIELDS
from services.worker.engines.vllm.sampling import sampling_arguments

log = logging.getLogger(__name__)

GENERATE, COMPLETIONS = "/inference/v1/generate", "/v1/completions"
RESET_CACHE = "/reset_prefix_cache"
MAX_LOGPROBS = 20
"""Log-probabilities of a token that vLLM's server is asked for; a request for more gets these."""
CAPABILITIES = (
    GUIDED
    | (sampling_of(FIELDS) - {Capability.BAD_WORDS, Capability.THINKING_TOKEN_BUDGET})
    | {
        Capability.TOKEN_IDS,
        Capability.LOGPROBS,
        Capability.CACHE_SALT,
        Capability.LORA,
        Capability.DATA_PARALLEL_RANK,
        Capability.KV_EVENTS,
        Capability.CLEAR_CACHE,
    }
)

_PLACEHOLDER = "token_id:"


class VllmDialect(Dialect):
    """Uses the generate endpoint of servers started with --enable-scale-out, else completions with token ids."""

    NAME = "vllm-http"
    ALIVE = "/health"
    COUNTS_COPIES = True

    def __init__(self) -> None:
        self._facts = Facts(0)
        self._model = ""
        self._generates = False
        self._total_blocks = 0
        self._reports_cached: bool | None = None  # None: no usage had them yet

    async def describe(self, client: HttpClient) -> Description:
        version = await client.get_json("/version")
        cards = (await client.get_json("/v1/models"))["data"]
        base = next((card for card in cards if not card.get("parent")), None)
        if base is None or not base.get("max_model_len"):
            raise internal("vLLM's server lists no model with a context length at /v1/models.")
        self._generates = await _accepts(client, GENERATE)
        if not self._generates and not await _accepts(client, COMPLETIONS):
            raise SluiceError(
                ErrorKind.FAILED_PRECONDITION, "vLLM's server generates no text; the http engine needs that."
            )
        self._facts, self._model = Facts(int(base["max_model_len"])), str(base["id"])
        configs = read_cache_configs(await _optional(client, "/metrics"))
        config: Mapping[str, str] = configs[0] if configs else {}
        self._total_blocks = _number(config.get("num_gpu_blocks"))
        ranks = len({one.get("engine") for one in configs}) or 1
        adapters = tuple(str(card["id"]) for card in cards if card.get("parent"))
        return Description(
            version=str(version["version"]),
            model=self._model,
            source=str(base.get("root") or base["id"]),
            context_length=self._facts.context_length,
            block_size=_number(config.get("block_size")),
            total_blocks=self._total_blocks,
            ranks=ranks,
            capabilities=await self._capabilities(client, ranks, bool(adapters), config),
            adapters=adapters,
            publishers=tuple(_publishers(await parse_object(await _optional(client, "/kv_event_sources") or b"{}"))),
        )

    async def _capabilities(
        self, client: HttpClient, ranks: int, has_adapters: bool, config: Mapping[str, str]
    ) -> frozenset[str]:
        missing: set[Capability] = set()
        if config.get("enable_prefix_caching") == "False":
            missing.add(Capability.KV_EVENTS)
        if ranks < 2:
            missing.add(Capability.DATA_PARALLEL_RANK)
        if not has_adapters:
            missing.add(Capability.LORA)
        if not self._generates:
            missing.add(Capability.ENGINE_OPTIONS)  # completions ignores fields that it does not have
        if not await client.exists(RESET_CACHE):
            missing.add(Capability.CLEAR_CACHE)
        return frozenset(CAPABILITIES - missing)

    def call(self, request: GenerateRequest, request_id: str) -> GenerateCall:
        arguments = sampling_arguments(request, self._facts)
        body: dict[str, Any] = {
            "request_id": request_id,
            "model": request.lora or self._model,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if request.cache_salt:
            body["cache_salt"] = request.cache_salt
        headers = {}
        if request.data_parallel_rank is not None:
            headers["X-data-parallel-rank"] = str(request.data_parallel_rank)
        prompt = request.token_ids.tolist()
        if not self._generates:
            asked = {"prompt": prompt, "return_token_ids": True, "return_tokens_as_token_ids": True}
            return GenerateCall(COMPLETIONS, {**body, **arguments, **asked}, headers)
        if top := arguments.get("logprobs"):
            arguments["logprobs"] = min(top + 1, MAX_LOGPROBS)  # the chosen token occupies one entry
        if not arguments.get("stop"):
            arguments["detokenize"] = False
        return GenerateCall(GENERATE, {**body, "token_ids": prompt, "sampling_params": arguments}, headers)

    def reader(self, request: GenerateRequest, sink: Sink) -> VllmReader:
        return VllmReader(request, sink, self._cached_of)

    async def loads(self, client: HttpClient) -> Sequence[Load]:
        return read_loads(await _optional(client, "/metrics"), self._total_blocks)

    async def clear_cache(self, client: HttpClient) -> None:
        answer = await parse_object(await client.post(RESET_CACHE))
        if not answer.get("success"):
            raise SluiceError(
                ErrorKind.FAILED_PRECONDITION,
                "vLLM cannot clear its cache while requests hold blocks.",
                code="cache_in_use",
            )

    def _cached_of(self, usage: Mapping[str, Any]) -> int | None:
        """Returns the cached tokens of a usage; None if the server does not report them.

        A server that reports them leaves them out where there are none.
        """
        details = usage.get("prompt_tokens_details")
        if details is not None:
            self._reports_cached = True
            return int(details.get("cached_tokens") or 0)
        if self._reports_cached is None:
            self._reports_cached = False
            log.warning(
                "vLLM's server does not report cached tokens, so usage shows none; start it with "
                "--enable-prompt-tokens-details"
            )
        return 0 if self._reports_cached else None


class VllmReader(InflightState):
    """Reads the chunks of one generation; the number of cached tokens arrives last, with the usage."""

    def __init__(
        self, request: GenerateRequest, sink: Sink, cached_of: Callable[[Mapping[str, Any]], int | None]
    ) -> None:
        super().__init__(len(request.token_ids), sink, request.guided)
        self._top = request.logprobs
        self._cached_of = cached_of
        self._has_begun = False
        self._last_token_id: int | None = None
        self._finish: tuple[FinishReason, int | None] | None = None

    def take(self, event: Mapping[str, Any]) -> None:
        """Processes one chunk."""
        if "error" in event:
            error = event["error"]
            raise error_of(int(error.get("code") or 500), str(error.get("message") or ""))
        if self.ended:
            return
        for choice in event["choices"]:
            self._take_choice(choice)
        if not event["choices"] and (usage := event.get("usage")) is not None:
            self._take_usage(usage)

    @property
    def finishing(self) -> bool:
        """Whether all tokens have arrived, and only the usage is missing."""
        return self._finish is not None and not self.ended

    @property
    def begun(self) -> bool:
        """Whether the sink has begun."""
        return self._has_begun

    @property
    def _reported_cached(self) -> int | None:
        return self._cached_tokens

    def close(self) -> None:
        """Ends a generation whose server sent no usage; raises SluiceError when it has not finished."""
        if self._finish is None:
            raise incomplete()
        reason, stop_token_id = self._finish
        self.end(reason, stop_token_id=stop_token_id)

    def _take_choice(self, choice: Mapping[str, Any]) -> None:
        token_ids: Sequence[int] = choice.get("token_ids") or ()
        if token_ids:
            if not self._has_begun:
                self._has_begun = True
                self._sink.begin(None)
            self._completion_tokens += len(token_ids)
            self._last_token_id = token_ids[-1]
            logprobs = choice.get("logprobs")
            self._sink.push(token_ids, () if self._top is None else list(read_logprobs(logprobs or {}, self._top)))
        if reason := choice.get("finish_reason"):
            self._finish = self._read_finish(str(reason), choice.get("stop_reason"))

    def _read_finish(self, reason: str, stopped_by: object) -> tuple[FinishReason, int | None]:
        if reason == "length":
            return FinishReason.LENGTH, None
        if reason in ("stop", "repetition"):
            return FinishReason.STOP, stopped_by if isinstance(stopped_by, int) else self._last_token_id
        if reason == "abort":  # not by this worker, which closes the connection
            raise incomplete()
        raise RequestFailedError()

    def _take_usage(self, usage: Mapping[str, Any]) -> None:
        cached = self._cached_of(usage)
        self._cached_tokens = None if cached is None else min(cached, self.prompt_tokens)
        if self._finish is not None:
            self.close()


def read_logprobs(logprobs: Mapping[str, Any], top: int) -> Iterator[PositionLogprobs]:
    """Yields the log-probabilities of each position, in the shape of either endpoint."""
    if "content" in logprobs:
        for entry in logprobs["content"] or ():
            candidates = {int(other["token_id"]): float(other["logprob"]) for other in entry.get("top_logprobs") or ()}
            yield _position(int(entry["token_id"]), float(entry["logprob"]), candidates, top)
        return
    values, best = logprobs.get("token_logprobs") or (), logprobs.get("top_logprobs") or ()
    for index, token in enumerate(logprobs.get("tokens") or ()):
        found = best[index] if index < len(best) else None
        candidates = {_token_id(other): float(value) for other, value in (found or {}).items()}
        yield _position(_token_id(token), values[index], candidates, top)


def _position(token_id: int, logprob: float | None, candidates: Mapping[int, float], top: int) -> PositionLogprobs:
    ranked = sorted(candidates.items(), key=lambda entry: -entry[1])[:top]
    ranks = {other_id: rank for rank, (other_id, _) in enumerate(ranked, 1)}
    value = LOWEST_LOGPROB if logprob is None else max(logprob, LOWEST_LOGPROB)
    return PositionLogprobs(
        TokenLogprob(token_id, value, ranks.get(token_id, 0)),
        tuple(TokenLogprob(other_id, max(other, LOWEST_LOGPROB), ranks[other_id]) for other_id, other in ranked),
    )


def _token_id(token: str) -> int:
    return int(token.removeprefix(_PLACEHOLDER))


async def _accepts(client: HttpClient, path: str) -> bool:
    """Whether an endpoint exists and is enabled; a disabled one rejects every body with 403."""
    status = await client.status(path, {})
    if status == 401:
        raise error_of(status, "")
    return status in (400, 422)


async def _optional(client: HttpClient, path: str) -> bytes:
    """Returns the body of a GET; empty if the server does not have the path."""
    try:
        return await client.get(path)
    except SluiceError as error:
        if error.kind is ErrorKind.NOT_FOUND:
            return b""
        raise


def _publishers(sources: Mapping[str, Any]) -> Iterator[Publisher]:
    """Yields the publishers that subscribers can connect to; vLLM binds wildcard and ipc endpoints only."""
    for rank, config in sorted(sources.items(), key=lambda item: int(item[0])):
        endpoint = str(config.get("endpoint") or "")
        if config.get("publisher") == "zmq" and endpoint:
            yield Publisher(
                int(rank), endpoint, str(config.get("replay_endpoint") or ""), str(config.get("topic") or "")
            )


def _number(text: str | None) -> int:
    return int(text) if text is not None and text.isascii() and text.isdecimal() else 0
