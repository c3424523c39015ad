"""Parity of images: the fingerprints on the cards of workers, and gateways that compare them with preprocess'."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, cast

import pytest

from services.common.base.errors import SluiceError
from services.gateway.backends.workers.capabilities import able, modalities
from services.gateway.backends.workers.registry import WorkerRegistry
from services.preprocess.tokenizers.hf import HfTokenizer
from services.preprocess.tokenizers.probes import media_fingerprint
from services.worker.serving.wire import write_card
from sluice.v1 import router_pb2
from tests.support.data.loaded_tokenizers import limits
from tests.support.data.tiny_vlm import VisionFolders, build_vision_models
from tests.support.servers.workers import hosted

NEEDS = (("image", "messages[2].content[1]"),)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> VisionFolders:
    return build_vision_models(tmp_path_factory.mktemp("vision"))


@pytest.fixture
def other(folders: VisionFolders, tmp_path: Path) -> Path:
    """The Qwen2-VL model with another limit on the pixels of an image: equal texts, other tokens of images."""
    folder = tmp_path / "other"
    shutil.copytree(folders.qwen2_vl, folder)
    config = json.loads((folder / "preprocessor_config.json").read_text())
    (folder / "preprocessor_config.json").write_text(json.dumps({**config, "max_pixels": config["max_pixels"] // 2}))
    return folder


async def registered(folder: Path, processing: str = "prompts") -> tuple[WorkerRegistry, router_pb2.WorkerInfo]:
    """A gateway's registry with a worker of the folder, and the registration."""
    async with hosted(folder, processing=processing) as host:
        card = write_card(host.worker.config, 0)
    registry = WorkerRegistry(cast(Any, None), lambda entry: None, lambda name: None)
    registration = router_pb2.WorkerInfo(worker_id="w", address="127.0.0.1:1", epoch=1, card=card)
    assert registry._add(registration)
    return registry, registration


def of_preprocess(folder: Path) -> dict[str, str]:
    return {"tiny": media_fingerprint(HfTokenizer(folder, limits()))}


@pytest.mark.parametrize("family", ["llava", "qwen2_vl"])
async def test_worker_with_the_same_folder_gets_images(folders: VisionFolders, family: str) -> None:
    folder = getattr(folders, family)
    registry, registration = await registered(folder)
    assert registration.card.tokenizer.media_fingerprint == of_preprocess(folder)["tiny"] != ""
    registry.compare_media(of_preprocess(folder))
    assert able(registry.of_model("tiny"), NEEDS)
    videos = ["video"] if family == "qwen2_vl" else []
    assert modalities(registry.of_model("tiny")) == ["text", "image", *videos]


async def test_worker_with_another_folder_gets_text_only(folders: VisionFolders, other: Path) -> None:
    registry, registration = await registered(other)
    registry.compare_media(of_preprocess(folders.qwen2_vl))
    with pytest.raises(SluiceError, match="load the same model folder") as refused:
        able(registry.of_model("tiny"), NEEDS)
    assert refused.value.code == "media_parity"
    assert able(registry.of_model("tiny"), ())
    assert modalities(registry.of_model("tiny")) == ["text"]
    assert registry._add(registration)  # as a restarted router sends it
    assert registry.of_model("tiny")[0].media_differ == {"image", "video"}


async def test_worker_that_makes_no_prompts_is_not_judged(folders: VisionFolders, other: Path) -> None:
    registry, registration = await registered(other, processing="none")
    assert registration.card.tokenizer.media_fingerprint == ""
    registry.compare_media(of_preprocess(folders.qwen2_vl))
    assert able(registry.of_model("tiny"), NEEDS)
