"""/tokenize, /detokenize and /v1/chat/completions/render, over an application whose preprocess is a stand-in."""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest

from services.common.base.errors import invalid
from services.common.base.packing import pack_u32, unpack_u32
from services.gateway.apis.openai.embeddings import EmbeddingOperations
from services.gateway.apis.openai.operations import OpenAIOperations
from services.gateway.apis.openai.tokens import TokenOperations
from services.gateway.apis.routes import ApiRoutes
from services.gateway.app.application import bare_app, create_app
from services.gateway.app.readiness import Readiness
from services.gateway.backends.workers.registry import WorkerEntry, WorkerRegistry
from services.gateway.core.request import ChatPrompt, Prompt, SamplingParams, TextPrompt, TokenizedPrompt
from services.gateway.http.json_transport import BodyReader, HttpTransport
from services.gateway.http.write_scheduler import WriteScheduler
from services.gateway.operations.registry import Operations
from services.gateway.operations.runner import AnswerRunner
from services.gateway.pipeline.models import Pipelines
from services.gateway.settings import GatewaySettings

MESSAGES = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


class Preprocess:
    """Ids are the bytes of the text, after a 1 where special tokens are added."""

    def __init__(self) -> None:
        self.asked: list[Prompt] = []

    async def tokenize(
        self, model: str, prompt: Prompt, block_size: int = 0, lora: str = "", cache_salt: str = ""
    ) -> TokenizedPrompt:
        self.asked.append(prompt)
        if isinstance(prompt, TextPrompt):
            ids = [*([] if prompt.add_special_tokens is False else [1]), *prompt.text.encode()]
        else:
            assert isinstance(prompt, ChatPrompt)
            ids = list(prompt.messages_json)
        defaults = SamplingParams(temperature=0.3, top_p=0.9)
        return TokenizedPrompt(pack_u32(ids), b"", "", pack_u32([7]), pack_u32([2]), 100, b"", defaults=defaults)

    async def detokenize(self, model: str, token_ids: bytes, skip_special_tokens: bool = True) -> str:
        assert not skip_special_tokens
        ids = unpack_u32(token_ids)
        if any(token > 255 for token in ids):
            raise invalid("Token id 256 is outside the model's vocabulary of 256.", param="token_ids")
        return bytes(ids.tolist()).decode()

    async def token_texts(self, model: str, token_ids: bytes) -> list[str]:
        return [chr(token) for token in unpack_u32(token_ids)]

    async def render(self, model: str, prompt: ChatPrompt) -> str:
        return "rendered"


def entry(worker_id: str, model: str) -> WorkerEntry:
    return WorkerEntry(worker_id, "127.0.0.1:1", 1, model, 16, 64, 256, frozenset(), 0)


class Gateway:
    """The application, with as many models as a test wants."""

    def __init__(self) -> None:
        self.preprocess = Preprocess()
        self.registry = WorkerRegistry(cast(Any, None), lambda worker: None, lambda worker_id: None)
        self.registry.synced = True
        self.registry.workers["w"] = entry("w", "m")
        settings = GatewaySettings(max_body_mb=0.01)
        bodies = BodyReader(10_485, settings.body_timeout_s, settings.budgets.values)
        routes = ApiRoutes(bare_app(), HttpTransport(bodies, WriteScheduler(), 1000), Operations())
        pipelines = cast(Pipelines, SimpleNamespace(preprocess=self.preprocess, registry=self.registry))
        openai = OpenAIOperations(AnswerRunner(pipelines, cast(Any, None)), settings, cast(Any, None))
        tokens = TokenOperations(pipelines, settings)
        embeddings = EmbeddingOperations(pipelines, cast(Any, None), settings)
        create_app(routes, openai, tokens, embeddings, cast(Readiness, None))
        self.client = httpx.AsyncClient(transport=httpx.ASGITransport(routes.app), base_url="http://gateway")

    async def post(self, path: str, **body: Any) -> tuple[int, Any]:
        answer = await self.client.post(path, json=body)
        return answer.status_code, answer.json()


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    made = Gateway()
    async with made.client:
        yield made


async def test_a_prompt_becomes_ids(gateway: Gateway) -> None:
    expected = {"count": 3, "max_model_len": 64, "tokens": [1, 97, 98], "token_strs": None}
    assert await gateway.post("/tokenize", model="m", prompt="ab") == (200, expected)
    _, bare = await gateway.post("/tokenize", prompt="ab", add_special_tokens=False, return_token_strs=True)
    assert bare == {"count": 2, "max_model_len": 64, "tokens": [97, 98], "token_strs": ["a", "b"]}


async def test_a_chat_becomes_ids_with_all_that_belongs_to_it(gateway: Gateway) -> None:
    status, answer = await gateway.post(
        "/tokenize", model="m", messages=MESSAGES, tools=[TOOL], chat_template="t", chat_template_kwargs={"k": 1},
        add_generation_prompt=False, continue_final_message=True, add_special_tokens=False,
    )  # fmt: skip
    assert status == 200
    (prompt,) = gateway.preprocess.asked
    assert prompt == ChatPrompt(
        b'[{"role":"user","content":"hi"}]',
        tools_json=b'[{"type":"function","function":{"name":"f","parameters":{"type":"object"}}}]',
        template_kwargs_json=b'{"k":1}',
        chat_template="t",
        add_generation_prompt=False,
        continue_final_message=True,
    )
    assert answer["count"] == len(answer["tokens"]) == len(prompt.messages_json)


async def test_ids_become_text(gateway: Gateway) -> None:
    assert await gateway.post("/detokenize", model="m", tokens=[104, 105]) == (200, {"prompt": "hi"})
    assert await gateway.post("/detokenize", tokens=[]) == (200, {"prompt": ""})


async def test_a_chat_completion_is_shown_as_its_worker_would_get_it(gateway: Gateway) -> None:
    status, answer = await gateway.post(
        "/v1/chat/completions/render", model="m", messages=MESSAGES, temperature=0.5, max_tokens=9, stop=["x"],
        stop_token_ids=[5, 2],
    )  # fmt: skip
    assert status == 200
    assert answer.pop("request_id").startswith("chatcmpl-")
    assert answer == {
        "model": "m",
        "token_ids": list(b'[{"role":"user","content":"hi"}]'),
        "prompt": "rendered",
        "sampling_params": {
            "temperature": 0.5,
            "top_p": 0.9,
            "max_tokens": 9,
            "stop": ["x"],
            "n": 1,
            "stop_token_ids": [5, 2, 7],
        },
        "max_model_len": 64,
        "stream": False,
    }


async def test_without_a_model_the_only_one_is_meant(gateway: Gateway) -> None:
    gateway.registry.workers["v"] = entry("v", "other")
    status, answer = await gateway.post("/tokenize", prompt="ab")
    assert (status, answer["error"]["param"]) == (400, "model")
    assert (await gateway.post("/tokenize", model="other", prompt="ab"))[0] == 200


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {"model": "nope", "prompt": "x"}, 404, "model"),
        ("/tokenize", {"model": "m"}, 400, "prompt"),
        ("/tokenize", {"model": "m", "prompt": "x", "messages": MESSAGES}, 400, "prompt"),
        ("/tokenize", {"model": "m", "prompt": "x", "tools": [TOOL]}, 400, "tools"),
        ("/tokenize", {"model": "m", "messages": []}, 400, "messages"),
        ("/tokenize", {"model": "m", "messages": MESSAGES, "add_special_tokens": True}, 400, "add_special_tokens"),
        ("/tokenize", {"model": "m", "messages": MESSAGES, "tools": [{"type": "x"}]}, 400, "tools[0].type"),
        ("/tokenize", {"model": "m", "prompt": 1}, 400, "prompt"),
        ("/tokenize", {"model": "m", "prompt": "x", "mood": "good"}, 400, "mood"),
        ("/tokenize", {"model": "m", "prompt": "x" * 20_000}, 413, None),
        ("/detokenize", {"model": "m"}, 400, "tokens"),
        ("/detokenize", {"model": "m", "tokens": "x"}, 400, "tokens"),
        ("/detokenize", {"model": "m", "tokens": [1, -1]}, 400, "tokens[1]"),
        ("/detokenize", {"model": "m", "tokens": [2**32]}, 400, "tokens[0]"),
        ("/detokenize", {"model": "m", "tokens": [256]}, 400, "tokens"),
        ("/detokenize", {"model": "nope", "tokens": [1]}, 404, "model"),
        ("/v1/chat/completions/render", {"model": "m"}, 400, "messages"),
        ("/v1/chat/completions/render", {"model": "nope", "messages": MESSAGES}, 404, "model"),
        ("/v1/chat/completions/render", {"model": "m", "messages": MESSAGES, "logprobs": 1}, 400, "logprobs"),
    ],
)
async def test_mistakes_are_openai_errors(
    gateway: Gateway, path: str, body: dict[str, Any], status: int, param: str | None
) -> None:
    got, answer = await gateway.post(path, **body)
    assert got == status
    assert answer["error"]["param"] == param
    assert answer["error"]["type"] == "invalid_request_error"
    assert answer["error"]["message"].endswith(".")
