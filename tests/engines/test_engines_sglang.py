"""The sglang engine against SGLang's own Engine, as real worker processes of its environment."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import pytest_asyncio
from tokenizers import Tokenizer

from services.common.base.errors import SluiceError
from sluice.v1 import common_pb2, worker_pb2
from tests.engines import engine_suite as suite
from tests.support.data.tiny_models import ServableFolders, build_servable
from tests.support.servers.router_child import RouterChild
from tests.support.waiting import until

pytestmark = [pytest.mark.engines, pytest.mark.asyncio(loop_scope="module")]

FLAGS = ("--block-size", "16", "--total-blocks", "1024", "--max-batched-tokens", "1024", "--max-sequences", "64")
Action = worker_pb2.ControlRequest


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> ServableFolders:
    return build_servable(tmp_path_factory.mktemp("servable"))


@pytest.fixture(scope="module")
def engine(folders: ServableFolders) -> suite.EngineUnderTest:
    return suite.EngineUnderTest(
        name="sglang",
        python=suite.interpreter("sglang"),
        model=folders.model,
        flags=(*FLAGS, "--adapters", f"first={folders.adapter}"),
        env={"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "SLUICE_WORKER_METRICS_LISTEN": ""},
        offline=("-P", str(Path(__file__).with_name("offline_sglang.py"))),
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def worker(engine: suite.EngineUnderTest) -> AsyncIterator[suite.RunningWorker]:
    async with suite.running(engine) as started:
        yield started


async def control(worker: suite.RunningWorker, action: Action.Action.ValueType, **arguments: str) -> None:
    await worker.stub.Control(Action(action=action, arguments=arguments), timeout=suite.CALL_S)


async def test_greedy_equals_sglang(engine: suite.EngineUnderTest, worker: suite.RunningWorker) -> None:
    await suite.greedy_equals_offline(engine, worker)


async def test_salts_separate_caches(worker: suite.RunningWorker) -> None:
    prompt = suite.prompts(1, 80, 80, seed=77)[0]
    first = await suite.generate(worker, suite.request("salt-1", prompt, 2, cache_salt="a"))
    other = await suite.generate(worker, suite.request("salt-2", prompt, 2, cache_salt="b"))
    again = await suite.generate(worker, suite.request("salt-3", prompt, 2, cache_salt="a"))
    assert (first.cached_tokens, other.cached_tokens, again.cached_tokens) == (0, 0, 64)


async def test_cache_after_clearing_is_empty(engine: suite.EngineUnderTest, worker: suite.RunningWorker) -> None:
    prompt = suite.prompts(1, 80, 80, seed=78)[0]
    await suite.generate(worker, suite.request("clear-1", prompt, 2))
    await worker.idle(engine.quiet_s)
    await control(worker, Action.ACTION_CLEAR_CACHE)
    assert (await suite.generate(worker, suite.request("clear-2", prompt, 2))).cached_tokens == 0


async def test_logprobs(engine: suite.EngineUnderTest, worker: suite.RunningWorker) -> None:
    await suite.logprobs_equal_offline(engine, worker)


async def test_prompt_logprobs_are_those_of_generating(worker: suite.RunningWorker) -> None:
    prompt = suite.prompts(1, 12, 12, seed=79)[0]
    options = common_pb2.OutputOptions(logprobs=1)
    made = await suite.generate(worker, suite.request("pl-1", prompt, 6, output=options))
    options = common_pb2.OutputOptions(prompt_logprobs=2)
    whole = [*prompt, *made.token_ids]
    told = await suite.generate(worker, suite.request("pl-2", whole, 1, output=options))
    assert [position.chosen.token_id for position in told.prompt_logprobs] == whole
    assert all(len(position.top) == 2 for position in told.prompt_logprobs[1:])
    for generated, read in zip(made.logprobs, told.prompt_logprobs[len(prompt) :], strict=True):
        assert read.chosen.logprob == pytest.approx(generated.chosen.logprob, abs=0.02)


async def test_constraints(worker: suite.RunningWorker, folders: ServableFolders) -> None:
    tokenizer = Tokenizer.from_file(str(folders.model / "tokenizer.json"))

    def decode(ids: Sequence[int]) -> str:
        text: str = tokenizer.decode(list(ids), skip_special_tokens=True)
        return text

    await suite.bad_grammars_are_refused_and_serving_goes_on(worker)
    for name, guided, allowed in (
        (
            "regex",
            common_pb2.GuidedDecoding(regex="(north|south)[0-9]"),
            {f"{a}{b}" for a in ("north", "south") for b in range(10)},
        ),
        ("ebnf", common_pb2.GuidedDecoding(ebnf='root ::= "up" | "down"'), {"up", "down"}),
        (
            "choice",
            common_pb2.GuidedDecoding(choice=common_pb2.GuidedDecoding.ChoiceList(choices=['"yes"\\', "no"])),
            {'"yes"\\', "no"},
        ),
    ):
        message = suite.request(f"guided-{name}", [20, 21, 22], 40, ignore_eos=False, guided=guided)
        assert decode((await suite.generate(worker, message)).token_ids) in allowed, name


async def test_sampling_options_change_the_output(worker: suite.RunningWorker) -> None:
    prompt = suite.prompts(1, 20, 20, seed=80)[0]
    plain = (await suite.generate(worker, suite.request("s-0", prompt, 60))).token_ids
    forced = common_pb2.SamplingOptions(temperature=0.0, logit_bias={300: 100.0})
    assert (await suite.generate(worker, suite.request("s-1", prompt, 3, sampling=forced))).token_ids == [300] * 3
    penalised = common_pb2.SamplingOptions(temperature=0.0, frequency_penalty=2.0, repetition_penalty=2.0)
    changed = (await suite.generate(worker, suite.request("s-2", prompt, 60, sampling=penalised))).token_ids
    assert len(set(changed)) > len(set(plain))
    only_best = common_pb2.SamplingOptions(temperature=5.0, top_k=1)
    assert (await suite.generate(worker, suite.request("s-3", prompt, 60, sampling=only_best))).token_ids == plain
    custom = common_pb2.SamplingOptions(temperature=0.0, engine_options_json=b'{"custom_params": {"a": 1}}')
    assert (await suite.generate(worker, suite.request("s-4", prompt, 60, sampling=custom))).token_ids == plain


async def test_adapters(engine: suite.EngineUnderTest, worker: suite.RunningWorker, folders: ServableFolders) -> None:
    prompt = suite.prompts(1, 30, 30, seed=81)[0]
    expected = await suite.offline(engine, {"prompts": [prompt], "max_tokens": 8, "adapter": str(folders.adapter)})
    plain = await suite.generate(worker, suite.request("l-0", prompt, 8))
    adapted = await suite.generate(worker, suite.request("l-1", prompt, 8, lora="first"))
    assert adapted.token_ids == expected["outputs"][0]["token_ids"] != plain.token_ids
    await control(worker, Action.ACTION_LOAD_LORA, name="second", path=str(folders.second_adapter))
    second = await suite.generate(worker, suite.request("l-2", prompt, 8, lora="second"))
    assert second.token_ids not in (plain.token_ids, adapted.token_ids)
    await control(worker, Action.ACTION_UNLOAD_LORA, name="second")
    with pytest.raises(SluiceError):
        await suite.generate(worker, suite.request("l-3", prompt, 8, lora="second"))


async def test_a_profile_is_written(worker: suite.RunningWorker, tmp_path: Path) -> None:
    await control(worker, Action.ACTION_START_PROFILE, path=str(tmp_path), activities="CPU")
    await suite.generate(worker, suite.request("p-0", [20, 21, 22], 4))
    await control(worker, Action.ACTION_STOP_PROFILE)
    await until(lambda: list(tmp_path.rglob("*trace*")), timeout_s=60)


async def test_nothing_listens_beyond_this_machine(worker: suite.RunningWorker) -> None:
    parent = psutil.Process(worker.process.pid)
    hosts = {
        connection.laddr.ip
        for process in (parent, *parent.children(recursive=True))
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }
    assert hosts
    assert all(host in ("127.0.0.1", "::1", "::ffff:127.0.0.1") for host in hosts)


async def test_cancellation_of_500_requests_frees_their_blocks(
    engine: suite.EngineUnderTest, worker: suite.RunningWorker
) -> None:
    await suite.random_cancels_leak_nothing(engine, worker)


async def test_routing_follows_the_caches(engine: suite.EngineUnderTest, tmp_path: Path) -> None:
    """A prompt goes where its blocks are: to SGLang those it computed, to another worker of the model the others."""
    router = RouterChild(tmp_path)
    await router.start()
    mock = suite.EngineUnderTest(
        name="mock", python=sys.executable, model=engine.model, flags=(*FLAGS, "--speedup", "100"), env=engine.env
    )
    join = ("--routers", f"127.0.0.1:{router.port}")
    try:
        async with (
            suite.running(engine, *join, "--worker-id", "real") as real,
            suite.running(mock, *join, "--worker-id", "mock") as other,
        ):
            mine, theirs = suite.prompts(2, 200, 200, seed=82)
            await suite.generate(real, suite.request("route-1", mine, 2))
            await suite.generate(other, suite.request("route-2", theirs, 2))
            await suite.until_routed(router, mine, ("real", 12))
            await suite.until_routed(router, theirs, ("mock", 12))
    finally:
        await router.stop()


async def test_embeddings(engine: suite.EngineUnderTest, folders: ServableFolders) -> None:
    embedder = replace(engine, model=folders.embedder, flags=(*FLAGS, "--engine-args", "is_embedding=true"))
    async with suite.running(embedder) as worker:
        await suite.embeddings_equal_offline(embedder, worker)
        assert "logprobs" not in await worker.claims()
        with pytest.raises(SluiceError):
            await suite.generate(worker, suite.request("none", [20, 21], 2))


async def test_killed_scheduler_ends_the_worker(engine: suite.EngineUnderTest) -> None:
    def is_scheduler(process: psutil.Process) -> bool:
        return "sglang" in process.name()

    await suite.killed_helper_is_noticed(engine, is_scheduler)


async def test_sigterm_under_load(engine: suite.EngineUnderTest) -> None:
    await suite.sigterm_lets_running_requests_finish(engine)
