"""A model's folder, sizes and sampling plan, before anything is loaded."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.base.errors import ErrorKind, SluiceError
from services.worker.contract.generation import SamplingParams, StructuredOutput
from services.worker.engines.transformers import options
from services.worker.engines.transformers.engine import TransformersEngine
from services.worker.engines.transformers.folder import read_folder
from services.worker.engines.transformers.options import Options
from services.worker.engines.transformers.sampling import History, SamplingPlan, plan_of
from services.worker.engines.transformers.sizing import Plan, Shape, fit, free_memory
from services.worker.engines.transformers.starting import start_engine
from services.worker.engines.transformers.step import Listener
from services.worker.settings import WorkerSettings
from sluice.cli import tiny_weights
from tests.support.data.tiny_models import CONTEXT_LENGTH, ServableFolders, build_servable
from tests.support.data.tiny_vlm import build_vision_models
from tests.support.fakes.engines import request
from tests.support.oracles.errors import raises_error


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> ServableFolders:
    return build_servable(tmp_path_factory.mktemp("servable"))


def refusal(source: str | Path) -> SluiceError:
    with pytest.raises(SluiceError) as caught:
        read_folder(str(source))
    return caught.value


def test_model_folder_is_read_into_its_description(folders: ServableFolders) -> None:
    read = read_folder(str(folders.model))
    assert read.context_length == CONTEXT_LENGTH
    assert read.config["num_hidden_layers"] == tiny_weights.LAYERS
    assert len(read.eos_token_ids) == 2
    assert read.weight_bytes > 100_000
    assert (read.dtype, read.pooling) == ("float32", "")


def test_folder_takes_images_if_its_kind_of_vision_part_is_supported(folders: ServableFolders, tmp_path: Path) -> None:
    assert not read_folder(str(folders.model)).takes_images
    for vision in build_vision_models(tmp_path):
        assert read_folder(str(vision)).takes_images
        config = json.loads((vision / "config.json").read_text("utf-8"))
        for other in ({**config, "model_type": "abacus"}, {**config, "vision_config": None}):
            (vision / "config.json").write_text(json.dumps(other), "utf-8")
            assert not read_folder(str(vision)).takes_images


def test_embedding_folder_reports_its_pooling(folders: ServableFolders) -> None:
    read = read_folder(str(folders.embedder))
    assert (read.pooling, read.normalise) == ("last", True)


def test_folders_that_cannot_be_served(tmp_path: Path, folders: ServableFolders) -> None:
    assert refusal(tmp_path / "nowhere").kind is ErrorKind.NOT_FOUND
    assert "no config.json" in refusal(tmp_path).message
    config: dict[str, Any] = json.loads((folders.model / "config.json").read_text("utf-8"))
    (tmp_path / "config.json").write_text(json.dumps(config), "utf-8")
    assert "contains no weights" in refusal(tmp_path).message
    (tmp_path / "config.json").write_text(json.dumps({**config, "hidden_size": None}), "utf-8")
    assert "hidden_size" in refusal(tmp_path).message
    assert "without weights" in refusal("mistral-common:tekken_240911").message


def test_an_unknown_pooling_is_refused(tmp_path: Path, folders: ServableFolders) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((folders.model / name).read_bytes())
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode_max_tokens": true}', "utf-8")
    assert "pooling" in refusal(tmp_path).message


@pytest.mark.parametrize(
    "text", ["dtype=int8", "attention=fast", "memory_share=0.95", "threads=0", "pooling=max", "x=1"]
)
def test_options_out_of_range(text: str) -> None:
    with raises_error(kind=ErrorKind.INVALID_ARGUMENT):
        options.read(text)
    assert options.read("") == Options()


def settings(folders: ServableFolders, **fields: Any) -> WorkerSettings:
    return WorkerSettings(**{"engine": "transformers", "model": f"tiny={folders.model}", **fields})


def test_other_roles_are_refused(folders: ServableFolders) -> None:
    with pytest.raises(SluiceError, match="does not support the role prefill"):
        TransformersEngine.from_args(settings(folders, role="prefill"))


def test_an_adapter_needs_a_folder(folders: ServableFolders) -> None:
    silent = Listener(lambda step: None, lambda: None, lambda phase: None)
    with pytest.raises(SluiceError, match="NAME=FOLDER"):
        start_engine(settings(folders, adapters=["x"]), Options(), silent)


def test_without_torch_the_extra_is_named(folders: ServableFolders, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    phases: list[str] = []
    listener = Listener(lambda step: None, lambda: None, phases.append)
    with pytest.raises(SluiceError, match=r"requires torch: .*sluice-llm\[transformers\]"):
        start_engine(settings(folders), Options(), listener)
    assert phases == ["reading the model's files", "importing torch and transformers"]


async def test_an_engine_that_never_started_has_no_load_and_cleans_up_twice(folders: ServableFolders) -> None:
    engine = TransformersEngine.from_args(settings(folders))
    assert engine.load()[0].running_requests == 0
    await engine.cleanup()
    await engine.cleanup()
    with raises_error(kind=ErrorKind.UNAVAILABLE):
        await engine.clear_cache()


CONFIG = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "vocab_size": 500,
}
WANTED = Plan(block_size=16, total_blocks=2048, max_batched_tokens=512, max_sequences=256)
ALL = frozenset({"total_blocks", "max_batched_tokens", "max_sequences"})


def test_a_token_of_cache_is_keys_and_values_of_every_layer() -> None:
    assert Shape.of(CONFIG, 4, masks=True).cache_bytes == 2 * 2 * 2 * 32 * 4
    assert Shape.of({**CONFIG, "head_dim": None, "num_key_value_heads": None}, 2, masks=False) == Shape(
        cache_bytes=2 * 2 * 4 * 16 * 2, read_bytes=2 * 8 * 16 * 2, mask_bytes=0, vocab_size=500
    )


def test_plenty_of_memory_changes_nothing() -> None:
    assert fit(WANTED, frozenset(), Shape.of(CONFIG, 4, masks=True), 1 << 40) == WANTED


@given(st.integers(0, 1 << 33), st.sets(st.sampled_from(sorted(ALL))))
def test_explicit_sizes_are_kept_and_the_result_fits(room: int, fixed: set[str]) -> None:
    shape = Shape.of(CONFIG, 4, masks=True)
    try:
        plan = fit(WANTED, frozenset(fixed), shape, room)
    except SluiceError as error:
        refused = error
    else:
        assert plan.bytes(shape) <= room
        assert all(getattr(plan, name) == getattr(WANTED, name) for name in fixed)
        return
    smallest = Plan(
        16,
        2048 if "total_blocks" in fixed else 64,
        512 if "max_batched_tokens" in fixed else 256,
        256 if "max_sequences" in fixed else 8,
    )
    assert smallest.bytes(shape) > room
    assert refused.kind is ErrorKind.FAILED_PRECONDITION


def test_too_little_memory_is_one_sentence_with_figures() -> None:
    with pytest.raises(SluiceError, match="Not enough memory: 2048 blocks of 16 tokens") as caught:
        fit(WANTED, ALL, Shape.of(CONFIG, 4, masks=True), 1 << 20)
    assert "1 MiB; lower --total-blocks" in caught.value.message


EOS = (1, 2)
UNSET = SamplingParams()


def plan(defaults: dict[str, Any] | None = None, sampling: SamplingParams = UNSET, **fields: Any) -> SamplingPlan:
    return plan_of(request(sampling=sampling, **fields), defaults or {}, EOS)


def test_unset_options_take_the_models_defaults_then_plain_values() -> None:
    assert plan() == SamplingPlan(stop_ids=EOS)
    made = plan({"temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.1, "min_p": None})
    assert (made.temperature, made.top_p, made.top_k, made.repetition_penalty, made.min_p) == (0.6, 0.9, 20, 1.1, 0.0)


def test_what_is_asked_for_beats_the_defaults() -> None:
    made = plan({"temperature": 0.6, "top_k": 20}, SamplingParams(temperature=0.0, top_k=-1))
    assert made.greedy
    assert made.top_k == 0


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {1, 2}),
        ({"stop_token_ids": frozenset({1, 7})}, {1, 7}),
        ({"stop_token_ids": frozenset({1, 7}), "eos_token_ids": (1,), "ignore_eos": True}, {7}),
        ({"eos_token_ids": (9,)}, {1, 2, 9}),
        ({"ignore_eos": True}, set()),
        ({"ignore_eos": True, "guided": StructuredOutput("regex", "a+")}, {1, 2}),
    ],
)
def test_stop_ids(fields: dict[str, Any], expected: set[int]) -> None:
    assert set(plan(**fields).stop_ids) == expected


def test_a_plan_knows_what_it_needs() -> None:
    assert not plan().edits_logits
    assert plan(min_tokens=2).edits_logits
    assert plan(sampling=SamplingParams(presence_penalty=0.5)).penalises
    assert plan(sampling=SamplingParams(top_p=0.5)).narrows
    assert not plan(sampling=SamplingParams(top_p=1.0, top_k=0, min_p=0.0)).narrows


@given(st.lists(st.integers(0, 9), min_size=1), st.lists(st.integers(0, 9)), st.integers(0, 5))
def test_history_counts_output_and_sees_everything(prompt: list[int], output: list[int], resumed: int) -> None:
    resumed = min(resumed, len(prompt))
    history = History(prompt, resumed)
    for token_id in output:
        history.add(token_id)
    counted = [*prompt[len(prompt) - resumed :], *output]
    assert history.output == counted
    assert history.counts == {token_id: counted.count(token_id) for token_id in set(counted)}
    assert history.seen == {*prompt, *output}
    assert history.generated == len(output)


def test_bad_words_ban_the_token_that_would_complete_them() -> None:
    history = History([5, 6])
    words = ((4,), (5, 6), (6, 7, 8))
    assert history.banned(words) == {4}
    history.add(5)
    assert history.banned(words) == {4, 6}
    history.add(6)
    history.add(7)
    assert history.banned(words) == {4, 8}


def test_free_memory_of_this_machine_is_positive() -> None:
    assert free_memory() > 1 << 20
