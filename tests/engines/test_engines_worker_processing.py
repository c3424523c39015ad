"""Chats and text through workers of real engines: the prompts are those of the engine's own code, and proven to be."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import pytest_asyncio

from services.common.base.packing import unpack_u32
from services.common.packages.model_files import ENGINE_PROCESSORS, ModelSpec
from services.gateway.backends.rpc.preprocess import TokenizerIdentity
from services.gateway.backends.workers.tokenizer_parity import PROVEN, compare
from services.preprocess.contract.tokenizer import ChatRequest, TokenizerProtocol
from services.preprocess.engines.engine_tokenizer import EngineTokenizer
from services.preprocess.tokenizers.engine_extensions import EngineOptions
from services.preprocess.tokenizers.loading import load_tokenizer
from services.preprocess.tokenizers.probes import prompt_fingerprint
from sluice.v1 import common_pb2, postprocess_pb2, worker_pb2
from tests.engines import engine_suite as suite
from tests.engines import test_engines_vllm
from tests.support.data.loaded_tokenizers import limits
from tests.support.data.tiny_models import build_servable

pytestmark = [pytest.mark.engines, pytest.mark.asyncio(loop_scope="module")]

Running = tuple[suite.RunningWorker, suite.EngineUnderTest, Path]
SIZES = ("--total-blocks", "128", "--context-length", "2048", "--max-sequences", "8")
QUIET = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
MESSAGES = [{"role": "user", "content": "What is the weather in Köln? <|im_end|>"}]


def sglang(model: Path) -> suite.EngineUnderTest:
    return suite.EngineUnderTest("sglang", suite.interpreter("sglang"), model, SIZES, QUIET)


def transformers(model: Path) -> suite.EngineUnderTest:
    return suite.EngineUnderTest("transformers", suite.interpreter("transformers"), model, SIZES, QUIET)


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="module",
    params=[test_engines_vllm.describe, sglang, transformers],
    ids=["vllm", "sglang", "transformers"],
)
async def worker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    describe: Callable[[Path], suite.EngineUnderTest] = request.param
    model = build_servable(tmp_path_factory.mktemp("servable")).model
    engine = describe(model)
    async with suite.running(engine, "--processing", "full") as started:
        yield started, engine, model


@contextmanager
def _engines_own(engine: suite.EngineUnderTest, model: Path) -> Iterator[TokenizerProtocol]:
    """What preprocess uses for this engine: the engine's own code where it has some."""
    if engine.name not in ENGINE_PROCESSORS:
        yield load_tokenizer(ModelSpec("tiny", str(model)), limits())
        return
    with closing(EngineTokenizer(engine.name, model, EngineOptions(python=engine.python))) as theirs:
        yield theirs


async def test_card_has_the_fingerprint_of_the_prompts(worker: Running) -> None:
    started, engine, model = worker
    card = (await started.info()).card
    assert {"text", "messages", "text_out"} <= set(card.capabilities)
    with _engines_own(engine, model) as ours:
        identity = TokenizerIdentity(engine.name, ours.facts.fingerprint, prompt_fingerprint(ours))
    theirs = _Said(card.tokenizer.fingerprint, card.tokenizer.prompt_fingerprint)
    assert compare(identity, theirs) == PROVEN
    answered = [probe for probe in theirs.prompt_fingerprint.split(",") if probe != "-"]
    assert len(answered) > 8


async def test_chat_with_engine_prompts_returns_text(worker: Running) -> None:
    started, _, model = worker
    ours = load_tokenizer(ModelSpec("tiny", str(model)), limits())
    request = worker_pb2.GenerateRequest(
        request_id="chat",
        model="tiny",
        messages_json=json.dumps({"messages": MESSAGES}).encode(),
        sampling=common_pb2.SamplingOptions(temperature=0.0),
        stop=common_pb2.StopOptions(max_tokens=24, ignore_eos=True),
        postprocess=postprocess_pb2.StreamOptions(skip_special_tokens=False),
    )
    token_ids: list[int] = []
    prompt: list[int] = []
    text = ""
    async for delta in started.stub.Generate(request, timeout=suite.CALL_S):
        token_ids += unpack_u32(delta.token_ids)
        prompt += unpack_u32(delta.extra.prompt_token_ids)
        text += "".join(event.text for event in delta.extra.events)
    assert prompt == ours.encode_chat(ChatRequest(MESSAGES))
    assert len(token_ids) == 24
    assert text == ours.decode(token_ids)

    # The same again, up to a text of its own.
    stop = text[len(text) // 2 :][:3]
    request.request_id, request.postprocess.stop[:] = "stopped", [stop]
    cut = ""
    async for delta in started.stub.Generate(request, timeout=suite.CALL_S):
        cut += "".join(event.text for event in delta.extra.events)
        last = delta.extra
    assert cut == text[: text.index(stop)]
    assert last.finish_reason == common_pb2.FINISH_REASON_STOP
    await started.idle(60)


class _Said:
    """What a card says, as parity wants it."""

    def __init__(self, fingerprint: str, prompt_fingerprint: str) -> None:
        self.fingerprint = fingerprint
        self.prompt_fingerprint = prompt_fingerprint
        self.media_fingerprint = ""
