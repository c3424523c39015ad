"""Every combination of the pipeline's knobs either answers as all the others do or is refused with what to change."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import orjson
import pytest

from services.common.base.errors import ErrorKind, SluiceError
from services.common.base.packing import unpack_u32
from services.gateway.backends.rpc import link
from services.gateway.backends.workers import connections as connections
from services.gateway.core import context
from services.gateway.core.context import NO_CONTEXT, RequestContext
from services.gateway.core.request import ChatPrompt, GenerationRequest, Parsing, SamplingParams, StopParams
from services.gateway.core.routing_hints import RoutingHints
from services.gateway.pipeline.config import PipelineConfig
from services.gateway.streams.migration_policy import MigrationPolicy
from services.worker.engines.mock.vocabulary import load_vocabulary
from tests.support.servers.survival import asking, staged

COMBINATIONS = list(
    product(("frontend", "engine"), ("frontend", "engine"), ("discover", "direct", "query-only"), (True, False))
)
REQUEST = asking(
    "r", "<<<script: <think>Rivers 🌦</think>One two. END three>>>",
    stop=StopParams(max_tokens=200, strings=("END",)),
    parsing=Parsing(reasoning_parser="think"),
)  # fmt: skip
HEARD = ("One two. ", "Rivers 🌦")


@pytest.fixture(autouse=True)
def undirected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "BACKOFF_S", (0.005, 0.05))
    monkeypatch.setattr(connections, "SWEEP_S", 0.05)
    context.enter(NO_CONTEXT)


def config_of(pre: Any, post: Any, routing: Any, migration: bool) -> PipelineConfig:
    return PipelineConfig(preprocessing=pre, postprocessing=post, routing=routing, migration=migration)


def test_there_are_twenty_four() -> None:
    assert len(COMBINATIONS) == 24
    refused = [knobs for knobs in COMBINATIONS if knobs[0] == "engine" and knobs[2] == "query-only"]
    assert len(refused) == 4


@pytest.mark.parametrize("knobs", COMBINATIONS, ids=lambda knobs: "-".join(map(str, knobs)))
async def test_every_combination_answers_the_same_or_is_refused(folder: Path, knobs: tuple[Any, ...]) -> None:
    pre, _, routing, migration = knobs
    config = config_of(*knobs)
    if routing == "query-only" and pre == "engine":
        with pytest.raises(ValueError, match="set preprocessing to frontend, or routing to discover or direct"):
            config.check()
        return
    policy = MigrationPolicy(wait_s=5)
    async with staged(folder, workers=2, policy=policy, config=config, processing="full") as stage:
        if routing == "query-only":
            with pytest.raises(SluiceError, match="routing query-only"):
                await stage.ask(REQUEST)
            prompt, route = await stage.pipeline.query(REQUEST)
            vocabulary = load_vocabulary(folder, "hf")
            assert unpack_u32(prompt.token_ids).tolist() == list(vocabulary.encode(REQUEST.prompt.text))  # type: ignore[union-attr]
            assert route.worker_id == "w0"
            assert stage.reservations.made == 0
            return
        if routing == "direct":
            context.enter(RequestContext(hints=RoutingHints(workers=("w0", "w1"))))
        heard = await stage.ask(REQUEST)
        assert (heard.text, heard.reasoning) == HEARD
        assert heard.finish is not None
        assert heard.finish.stop_string == "END"
        assert not heard.finish.degraded
        assert heard.usage[0] == len(load_vocabulary(folder, "hf").encode(REQUEST.prompt.text))  # type: ignore[union-attr]
        assert bool(stage.reservations.made) == (routing == "discover")
        assert bool(stage.replicas[0].service and stage.replicas[0].service._sessions) == (knobs[1] == "frontend")
        stage.knives[0].set(5)
        cut = await stage.ask(REQUEST)
        if migration:
            assert (cut.text, cut.reasoning) == HEARD
            assert cut.finish is not None
            assert cut.finish.migrations == 1
            assert cut.usage[:3] == heard.usage[:3]
        else:
            assert cut.error is not None
            assert cut.error.kind is ErrorKind.DISCONNECTED
        await stage.quiet()


def chat(name: str, content: str, **more: Any) -> GenerationRequest:
    prompt = ChatPrompt(orjson.dumps([{"role": "user", "content": content}]))
    return GenerationRequest(name, "tiny", prompt, 1, SamplingParams(seed=7), StopParams(max_tokens=60), **more)


async def test_chats_are_the_engines_too(folder: Path) -> None:
    config = PipelineConfig(preprocessing="engine", postprocessing="engine")
    async with staged(folder, workers=1, config=config, processing="full") as stage:
        heard = await stage.ask(chat("c", "<<<script: Hello there>>>"))
        assert heard.text == "Hello there"
        assert heard.usage[0] > len("Hello")
        broken = ChatPrompt(b'[{"role": 7}]')
        heard = await stage.ask(GenerationRequest("bad", "tiny", broken, 1, SamplingParams(), StopParams()))
        assert heard.error is not None
        assert heard.error.kind is ErrorKind.INVALID_ARGUMENT
        await stage.quiet()


async def test_workers_that_cannot_are_named(folder: Path) -> None:
    for config, word in (
        (PipelineConfig(preprocessing="engine"), "--preprocessing frontend"),
        (PipelineConfig(postprocessing="engine"), "--postprocessing frontend"),
    ):
        async with staged(folder, workers=1, config=config, processing="none") as stage:
            with pytest.raises(SluiceError) as refused:
                await stage.ask(REQUEST)
            assert (refused.value.kind, refused.value.code) == (ErrorKind.UNAVAILABLE, "engine_cannot")
            assert word in refused.value.message
            await stage.quiet()
