"""Stand-ins for the HTTP servers of vLLM 0.33 and SGLang 0.5.23: their endpoints and KV events, and no model.

Shapes are those of vllm/entrypoints/openai/completion/serving.py, vllm/distributed/kv_events.py,
vllm/entrypoints/scale_out/token_in_token_out/serving.py, sglang/srt/entrypoints/http_server.py,
sglang/srt/managers/tokenizer_manager.py and sglang/srt/disaggregation/kv_events.py. Generations answer 100, 101, …
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import uvicorn
import zmq
import zmq.asyncio
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from services.common.net.ports import free_port
from services.worker.kv_events.zmq_feed import END_OF_REPLAY
from tests.support.waiting import until

BLOCK = 16
CONTEXT = 512
FIRST_TOKEN = 100
TOTAL_BLOCKS = 64


class KvPublisher:
    """Publishes batches of KV events as the engines' ZmqEventPublisher does: PUB on one port, ROUTER on another."""

    def __init__(self, *, replays: bool = True) -> None:
        self.log: list[bytes] = []
        self.port, self.replay_port = free_port(), free_port() if replays else 0
        self._sockets: list[zmq.asyncio.Socket] = []
        self._replayer: asyncio.Task[None] | None = None
        self._open()

    async def restore(self) -> None:
        """Opens the sockets again, on the same ports, as soon as the operating system has released them."""
        async with asyncio.timeout(30):
            while not self._sockets:
                try:
                    self._open()
                except zmq.ZMQError:
                    self.cut()
                    await asyncio.sleep(0.01)

    def _open(self) -> None:
        context = zmq.asyncio.Context.instance()
        self._events = context.socket(zmq.PUB)
        self._sockets = [self._events]
        self._events.bind(f"tcp://127.0.0.1:{self.port}")
        if self.replay_port:
            replays = context.socket(zmq.ROUTER)
            self._sockets.append(replays)
            replays.bind(f"tcp://127.0.0.1:{self.replay_port}")
            self._replayer = asyncio.get_running_loop().create_task(self._serve_replays(replays))

    def cut(self) -> None:
        """Closes the sockets; batches published meanwhile are only available as a replay."""
        if self._replayer is not None:
            self._replayer.cancel()
        for socket in self._sockets:
            socket.close(linger=0)
        self._sockets = []

    async def publish(self, *events: dict[str, Any]) -> None:
        """Publishes one batch."""
        payload = msgspec.msgpack.encode([time.time(), list(events), 0])
        self.log.append(payload)
        if self._sockets:
            await self._events.send_multipart([b"", (len(self.log) - 1).to_bytes(8, "big"), payload])

    async def _serve_replays(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            client, _, start = await socket.recv_multipart()
            for number in range(int.from_bytes(start, "big"), len(self.log)):
                await socket.send_multipart([client, b"", b"", number.to_bytes(8, "big"), self.log[number]])
            await socket.send_multipart([client, b"", b"", END_OF_REPLAY, b""])


class FakeServer:
    """What both servers have in common.

    Attributes:
        gate: closed: generations stop after their first token.
        bodies: of all generations.
        disconnected: number of generations whose client closed the connection.
        failure: status and message with which generations are rejected.
        breaks: whether streams break off after the first token.
        block: tokens per block in the events.
        tells: whether computed blocks are published.
        waiting: reported number of waiting requests; `used_blocks` likewise.
    """

    def __init__(self, *, events: bool = True, replays: bool = True, block: int = BLOCK, api_key: str = "") -> None:
        self.app = FastAPI()
        self.gate = asyncio.Event()
        self.gate.set()
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.disconnected = 0
        self.failure: tuple[int, str] | None = None
        self.breaks = False
        self.healthy = True
        self.block = block
        self.tells = True
        self.api_key = api_key
        self.running = self.waiting = self.used_blocks = 0
        self.cached: set[tuple[int, ...]] = set()
        self.publisher = KvPublisher(replays=replays) if events else None

    def compute(self, prompt: Sequence[int]) -> tuple[int, dict[str, Any] | None]:
        """Returns the prompt's cached tokens, and the event of the blocks that are new."""
        prefixes = [tuple(prompt[:end]) for end in range(self.block, len(prompt) + 1, self.block)]
        known = [prefix for prefix in prefixes if prefix in self.cached]
        new = prefixes[len(known) :]
        self.cached.update(new)
        cached = min(len(known) * self.block, (len(prompt) - 1) // self.block * self.block)
        if not new:
            return cached, None
        return cached, {
            "type": "BlockStored",
            "block_hashes": [hash_of(prefix) for prefix in new],
            "parent_block_hash": hash_of(known[-1]) if known else None,
            "token_ids": list(prompt[len(known) * self.block : len(prefixes) * self.block]),
            "block_size": self.block,
            "lora_id": None,
            "medium": "GPU",
        }

    async def publish(self, event: dict[str, Any] | None) -> None:
        """Publishes one event, unless the server does not publish."""
        if event is not None and self.publisher is not None and self.tells:
            await self.publisher.publish(event)

    async def evict(self, prompt: Sequence[int]) -> None:
        """Removes a prompt's blocks."""
        prefixes = [tuple(prompt[:end]) for end in range(self.block, len(prompt) + 1, self.block)]
        self.cached.difference_update(prefixes)
        hashes = [hash_of(prefix) for prefix in prefixes]
        await self.publish({"type": "BlockRemoved", "block_hashes": hashes, "medium": "GPU"})

    async def steps(self, request: Request, count: int) -> AsyncIterator[int]:
        """Yields the number of each generated token."""
        try:
            for index in range(count):
                yield index
                if self.breaks:
                    raise ConnectionResetError("the engine died")
                while not self.gate.is_set():
                    if await request.is_disconnected():
                        self.disconnected += 1
                        return
                    await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            self.disconnected += 1
            raise


class _Stream(StreamingResponse):
    """An answer that counts as running until it ends: a generator that is cancelled while it sends waits for the GC."""

    def __init__(self, fake: FakeServer, content: AsyncIterator[str]) -> None:
        super().__init__(content, media_type="text/event-stream")
        self._fake = fake

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._fake.running += 1
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._fake.running -= 1


def hash_of(prefix: Sequence[int]) -> int:
    """The engine's own hash of a block."""
    return hash(tuple(prefix)) & (2**63 - 1)


def sse(content: object) -> str:
    """One server-sent event."""
    return f"data: {json.dumps(content)}\n\n"


class FakeVllm(FakeServer):
    """`vllm serve` with --enable-prompt-tokens-details, unless `details` is false.

    Args:
        scale_out: started with --enable-scale-out.

    Attributes:
        usage_s: how long the usage follows the last tokens; infinite: it never does.
    """

    def __init__(
        self, root: str, *, scale_out: bool = False, details: bool = True, max_model_len: int = CONTEXT, **common: Any
    ) -> None:
        super().__init__(**common)
        self._root, self._scale_out, self._details, self._length = root, scale_out, details, max_model_len
        self.usage_s = 0.0
        for path in ("/health", "/version", "/metrics", "/kv_event_sources", "/v1/models"):
            self.app.get(path)(getattr(self, path.strip("/").replace("/", "_")))
        self.app.post("/v1/completions")(self.completions)
        self.app.post("/inference/v1/generate")(self.generate)
        self.app.middleware("http")(self.authenticate)

    async def authenticate(self, request: Request, call_next: Any) -> Response:
        guarded = request.url.path.startswith(("/v1", "/inference"))
        if self.api_key and guarded and request.headers.get("Authorization") != f"Bearer {self.api_key}":
            return JSONResponse({"error": "Unauthorized"}, 401)
        answer: Response = await call_next(request)
        return answer

    async def health(self) -> Response:
        return Response(status_code=200 if self.healthy else 503)

    async def version(self) -> Response:
        return JSONResponse({"version": "0.33.0"})

    async def v1_models(self) -> Response:
        card = {"id": "tiny", "object": "model", "root": self._root, "parent": None, "max_model_len": self._length}
        adapter = {"id": "poet", "object": "model", "root": "/adapters/poet", "parent": "tiny", "max_model_len": None}
        return JSONResponse({"object": "list", "data": [card, adapter]})

    async def metrics(self) -> Response:
        labels = f'block_size="{self.block}",enable_prefix_caching="True",engine="0",num_gpu_blocks="{TOTAL_BLOCKS}"'
        lines = [
            "# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig",
            "# TYPE vllm:cache_config_info gauge",
            f"vllm:cache_config_info{{{labels}}} 1.0",
            "# TYPE vllm:num_requests_running gauge",
            f'vllm:num_requests_running{{engine="0",model_name="tiny"}} {float(self.running)}',
            f'vllm:num_requests_waiting{{engine="0",model_name="tiny"}} {float(self.waiting)}',
            'vllm:num_requests_waiting_by_reason{engine="0",model_name="tiny",reason="capacity"} 9.0',
            f'vllm:kv_cache_usage_perc{{engine="0",model_name="tiny"}} {self.used_blocks / TOTAL_BLOCKS}',
        ]
        return PlainTextResponse("\n".join(lines) + "\n")

    async def kv_event_sources(self) -> Response:
        if self.publisher is None:
            return JSONResponse({})
        replay = self.publisher.replay_port
        source = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{self.publisher.port}",
            "replay_endpoint": f"tcp://*:{replay}" if replay else None,
            "topic": "",
        }
        return JSONResponse({"0": source})

    async def completions(self, request: Request) -> Response:
        body = await request.json()
        if not body.get("prompt"):
            return _vllm_error(400, "Either prompt or prompt_embeds must be provided and non-empty.")
        return await self._answer(request, body, body["prompt"], body, self._completion_choice)

    async def generate(self, request: Request) -> Response:
        if not self._scale_out:
            return _vllm_error(403, "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out.")
        body = await request.json()
        if not body.get("token_ids"):
            return JSONResponse({"detail": [{"type": "missing", "loc": ["body", "token_ids"]}]}, 422)
        return await self._answer(request, body, body["token_ids"], body["sampling_params"], self._generate_choice)

    async def _answer(
        self, request: Request, body: dict[str, Any], prompt: list[int], sampling: dict[str, Any], choice: Any
    ) -> Response:
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        if self.failure is not None:
            return _vllm_error(*self.failure)
        cached, event = self.compute(prompt)
        await self.publish(event)

        async def stream() -> AsyncIterator[str]:
            count = sampling["max_tokens"]
            async for index in self.steps(request, count):
                yield sse({"choices": [choice(index, sampling, "length" if index == count - 1 else None)]})
            usage: dict[str, Any] = {"prompt_tokens": len(prompt), "completion_tokens": count}
            await asyncio.sleep(min(self.usage_s, 3600))
            if self._details:
                usage["prompt_tokens_details"] = {"cached_tokens": cached}
            yield sse({"choices": [], "usage": usage})
            yield "data: [DONE]\n\n"

        return _Stream(self, stream())

    @staticmethod
    def _completion_choice(index: int, sampling: dict[str, Any], finish: str | None) -> dict[str, Any]:
        token = FIRST_TOKEN + index
        logprobs = None
        if sampling.get("logprobs") is not None:
            best = {f"token_id:{token}": -1.5, "token_id:7": -0.5}
            logprobs = {
                "text_offset": [0],
                "tokens": [f"token_id:{token}"],
                "token_logprobs": [-1.5],
                "top_logprobs": [dict(list(best.items())[: sampling["logprobs"] + 1])],
            }
        return {
            "index": 0,
            "text": "x",
            "logprobs": logprobs,
            "finish_reason": finish,
            "stop_reason": None,
            "token_ids": [token],
        }

    @staticmethod
    def _generate_choice(index: int, sampling: dict[str, Any], finish: str | None) -> dict[str, Any]:
        token = FIRST_TOKEN + index
        logprobs = None
        if (top := sampling.get("logprobs")) is not None:
            best = [
                {"token_id": token, "logprob": -1.5, "rank": 2},
                {"token_id": 7, "logprob": -0.5, "rank": 1},
            ][: max(top, 1)]
            logprobs = {"content": [{"token_id": token, "logprob": -1.5, "rank": 2, "top_logprobs": best}]}
        return {
            "index": 0,
            "logprobs": logprobs,
            "finish_reason": finish,
            "stop_reason": None,
            "token_ids": [token],
        }


def _vllm_error(status: int, message: str) -> Response:
    error = {"message": message, "type": "BadRequestError", "param": None, "code": status}
    return JSONResponse({"error": error}, status)


class FakeSglang(FakeServer):
    """An SGLang server; its streams repeat all ids so far, unless `incremental` (--incremental-streaming-output)."""

    def __init__(self, root: str, *, incremental: bool = False, **common: Any) -> None:
        super().__init__(**common)
        self._root, self._incremental = root, incremental
        self.aborted: list[str] = []
        self.flushed = 0
        for path in ("/health", "/model_info", "/server_info", "/v1/models", "/v1/loads"):
            self.app.get(path)(getattr(self, path.strip("/").replace("/", "_")))
        self.app.post("/generate")(self.generate)
        self.app.post("/abort_request")(self.abort)
        self.app.post("/flush_cache")(self.flush)

    async def health(self) -> Response:
        return Response(status_code=200 if self.healthy else 503)

    async def model_info(self) -> Response:
        if not self.healthy:
            return Response(status_code=503)
        info = {
            "model_path": self._root,
            "served_model_name": "tiny",
            "tokenizer_path": self._root,
            "is_generation": True,
        }
        return JSONResponse(info)

    async def server_info(self) -> Response:
        events = None
        if self.publisher is not None:
            events = {
                "publisher": "zmq",
                "endpoint_host": "*",
                "endpoint_port_base": self.publisher.port,
                "topic": "",
                "block_size": self.block,
                "dp_size": 1,
            }
            if self.publisher.replay_port:
                events["replay_endpoint_port_base"] = self.publisher.replay_port
        info = {
            "version": "0.5.23",
            "page_size": self.block,
            "dp_size": 1,
            "max_total_num_tokens": TOTAL_BLOCKS * self.block,
            "max_req_input_len": CONTEXT - 6,
            "max_running_requests": 8,
            "disable_radix_cache": False,
            "disaggregation_mode": "null",
            "enable_priority_scheduling": False,
            "grammar_backend": "xgrammar",
            "kv_events": events,
        }
        return JSONResponse(info)

    async def v1_models(self) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": "tiny", "root": "tiny", "max_model_len": CONTEXT}]})

    async def v1_loads(self) -> Response:
        load = {
            "dp_rank": 0,
            "num_running_reqs": self.running,
            "num_waiting_reqs": self.waiting,
            "num_used_tokens": self.used_blocks * self.block,
        }
        return JSONResponse({"loads": [{**load, "num_waiting_uncached_tokens": 40}]})

    async def abort(self, request: Request) -> Response:
        self.aborted.append((await request.json())["rid"])
        return Response()

    async def flush(self) -> Response:
        if self.running:
            return PlainTextResponse("Flush cache failed.\n", 400)
        self.flushed += 1
        self.cached.clear()
        await self.publish({"type": "AllBlocksCleared"})
        return PlainTextResponse("Cache flushed.\n")

    async def generate(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        prompt, sampling = body["input_ids"], body["sampling_params"]
        cached, event = self.compute(prompt)
        await self.publish(event)

        async def stream() -> AsyncIterator[str]:
            if self.failure is not None:
                status, message = self.failure
                yield sse({"error": {"message": message, "type": "invalid_request_error", "code": status}})
                yield "data: [DONE]\n\n"
                return
            count = sampling["max_new_tokens"]
            ids = []
            async for index in self.steps(request, count):
                ids.append(FIRST_TOKEN + index)
                shown = ids[-1:] if self._incremental else ids
                meta: dict[str, Any] = {
                    "id": body["rid"],
                    "finish_reason": {"type": "length", "length": count} if index == count - 1 else None,
                    "prompt_tokens": len(prompt),
                    "completion_tokens": len(ids),
                    "cached_tokens": cached,
                }
                if body.get("return_logprob"):
                    meta["output_token_logprobs"] = [[-1.5, token, None] for token in shown]
                    meta["output_top_logprobs"] = [[[-0.5, 7, None], [-1.5, token, None]] for token in shown]
                yield sse({"text": "x", "output_ids": shown, "meta_info": meta})
            yield "data: [DONE]\n\n"

        return _Stream(self, stream())


@asynccontextmanager
async def served(fake: FakeServer, port: int = 0) -> AsyncIterator[str]:
    """Serves a fake on this event loop; yields its URL."""
    config = uvicorn.Config(fake.app, host="127.0.0.1", port=port or free_port(), log_level="critical", lifespan="off")
    server = uvicorn.Server(config)
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    serving = asyncio.get_running_loop().create_task(server._serve())
    try:
        await until(lambda: server.started, 30)
        yield f"http://127.0.0.1:{config.port}"
    finally:
        server.should_exit = server.force_exit = True
        await serving
        if fake.publisher is not None:
            fake.publisher.cut()
