"""What a model's folder says before anything is loaded, and what is wrong with one in a sentence."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from services.common.errors import ErrorKind, SluiceError
from services.worker.engines.transformers import options
from services.worker.engines.transformers.engine import TransformersEngine
from services.worker.engines.transformers.folder import read_folder
from services.worker.engines.transformers.options import Options
from services.worker.engines.transformers.starting import start_engine
from services.worker.engines.transformers.step import Listener
from services.worker.settings import WorkerSettings
from sluice.cli import tiny_weights
from tests.support.data.tiny_models import CONTEXT_LENGTH, ServableFolders, build_servable


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> ServableFolders:
    return build_servable(tmp_path_factory.mktemp("servable"))


def refusal(source: str | Path) -> SluiceError:
    with pytest.raises(SluiceError) as caught:
        read_folder(str(source))
    return caught.value


def test_a_folder_says_what_it_holds(folders: ServableFolders) -> None:
    read = read_folder(str(folders.model))
    assert read.context_length == CONTEXT_LENGTH
    assert read.config["num_hidden_layers"] == tiny_weights.LAYERS
    assert len(read.eos_token_ids) == 2
    assert read.weight_bytes > 100_000
    assert (read.dtype, read.pooling) == ("float32", "")


def test_an_embedder_says_how_it_pools(folders: ServableFolders) -> None:
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
    with pytest.raises(SluiceError) as caught:
        options.read(text)
    assert caught.value.kind is ErrorKind.INVALID_ARGUMENT
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
    with pytest.raises(SluiceError) as caught:
        await engine.clear_cache()
    assert caught.value.kind is ErrorKind.UNAVAILABLE
