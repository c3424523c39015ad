"""Stages of the user's own: the examples do what they say, and what is no stage is refused with a sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.common.base.errors import ErrorKind, SluiceError
from services.common.base.packing import unpack_u32
from services.gateway.core import context
from services.gateway.core.context import NO_CONTEXT
from services.gateway.core.request import FinishReason, StopParams
from services.gateway.pipeline.config import PipelineConfig
from services.worker.engines.mock.vocabulary import load_vocabulary
from tests.support.servers.survival import asking, staged

EXAMPLES = Path(__file__).parents[3] / "examples" / "plugins"
PROMPT = "Tell me of rivers."


@pytest.fixture(autouse=True)
def examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    context.enter(NO_CONTEXT)


async def test_a_tokenize_stage(folder: Path) -> None:
    async with staged(folder, workers=1, config=PipelineConfig(stages={"tokenize": "own_stages:Tidy"})) as stage:
        heard = await stage.ask(asking("t", f"   {PROMPT}   "))
        assert heard.usage[0] == len(load_vocabulary(folder, "hf").encode(PROMPT))
        await stage.quiet()


async def test_a_route_stage(folder: Path) -> None:
    async with staged(folder, workers=2, config=PipelineConfig(stages={"route": "own_stages:Sticky"})) as stage:
        chosen = set()
        for salt in "abcdefgh":
            routes = [await stage.pipeline.query(asking("q", PROMPT, cache_salt=salt)) for _ in range(3)]
            assert len({route.worker_id for _, route in routes}) == 1
            chosen.add(routes[0][1].worker_id)
            assert (await stage.ask(asking("r", PROMPT, cache_salt=salt))).text
        assert chosen == {"w0", "w1"}
        assert stage.reservations.made == 0
        await stage.quiet()


async def test_a_place_stage_serves_and_migrates(folder: Path) -> None:
    async with staged(folder, workers=2, config=PipelineConfig(stages={"place": "own_stages:FirstConnected"})) as stage:
        told = await stage.ask(asking("p", PROMPT))
        stage.knives[0].set(5)
        heard = await stage.ask(asking("p", PROMPT))
        assert heard.comparable.text == told.text
        assert heard.finish is not None
        assert heard.finish.migrations == 1
        await stage.quiet()


async def test_a_postprocess_stage_says_and_stops(folder: Path) -> None:
    config = PipelineConfig(stages={"postprocess": "own_stages:TokenNumbers"})
    async with staged(folder, workers=1, config=config) as stage:
        generated = []
        heard = await stage.ask(asking("n", PROMPT))
        generated = heard.text.split(" ")
        assert generated[0] == f"({len(load_vocabulary(folder, 'hf').encode(PROMPT))})"
        assert all(number.isdigit() for number in generated[1:])
        assert len(generated) == 6
        assert heard.finish is not None
        assert heard.finish.reason is FinishReason.STOP
        short = await stage.ask(asking("s", PROMPT, stop=StopParams(max_tokens=2, ignore_eos=True)))
        assert len(short.text.split(" ")) == 3
        assert short.finish is not None
        assert short.finish.reason is FinishReason.LENGTH
        prompt, _ = await stage.pipeline.query(asking("q", PROMPT))
        assert unpack_u32(prompt.token_ids)
        await stage.quiet()


async def test_a_handler(folder: Path) -> None:
    async with staged(folder, workers=1, config=PipelineConfig(handler="own_stages:Moderated")) as stage:
        heard = await stage.ask(asking("h", PROMPT, stop=StopParams(max_tokens=100, ignore_eos=True)))
        assert heard.usage[1] == 8
        with pytest.raises(SluiceError, match="must not ask for secrets"):
            await stage.ask(asking("h", "a secret"))
        await stage.quiet()


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (PipelineConfig(stages={"route": "no_such_module:X"}), "cannot be loaded"),
        (PipelineConfig(stages={"route": "own_stages:Missing"}), "has no Missing"),
        (PipelineConfig(stages={"route": "own_stages:Tidy"}), "needs a method `async def route`"),
        (PipelineConfig(stages={"postprocess": "own_stages:Tidy"}), "needs a method `def open`"),
        (PipelineConfig(stages={"tokenize": "services.common.base.errors:invalid"}), "is not a class"),
        (PipelineConfig(handler="own_stages:Tidy"), "needs a method `async def start`"),
        (PipelineConfig(stages={"route": "own_stages:Sticky", "place": "own_stages:FirstConnected"}), "leave stage"),
    ],
)
async def test_what_is_no_stage_is_refused(folder: Path, config: PipelineConfig, sentence: str) -> None:
    with pytest.raises(SluiceError) as refused:
        async with staged(folder, workers=1, config=config):
            pass
    assert refused.value.kind is ErrorKind.FAILED_PRECONDITION
    assert sentence in refused.value.message


class Broken:
    """A postprocess stage that fails."""

    def __init__(self, components: object) -> None:
        pass

    def open(self, request: object, prompt: object) -> Broken:
        return self

    def feed(self, token_ids: object) -> None:
        raise KeyError("inside")


async def test_a_stage_that_fails_ends_its_request_with_a_typed_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import own_stages  # type: ignore[import-not-found]

    monkeypatch.setattr(own_stages, "TokenNumbers", Broken)
    config = PipelineConfig(stages={"postprocess": "own_stages:TokenNumbers"})
    async with staged(folder, workers=1, config=config) as stage:
        heard = await stage.ask(asking("n", PROMPT))
        assert heard.error is not None
        assert heard.error.kind is ErrorKind.INTERNAL
        assert "inside" not in heard.error.message
        await stage.quiet()
