from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from services.common.packages.model_files import ModelSpec
from services.common.types.media.spans import MediaKind
from services.preprocess.contract.tokenizer import ImageRule
from services.preprocess.engines.processor_rule import INSTALL
from services.preprocess.tokenizers.engine_extensions import EngineOptions
from services.preprocess.tokenizers.hf import HfTokenizer
from services.preprocess.tokenizers.loading import load_tokenizer
from tests.support.data.loaded_tokenizers import limits
from tests.support.data.unknown_family import build_unknown_family
from tests.support.fakes.fake_interpreters import write_image_processor


@pytest.fixture(autouse=True)
def no_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes this interpreter one without transformers, whether it has it or not."""
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "transformers" else found(name, *more)
    )


def load(folder: Path, python: str) -> HfTokenizer:
    engines = {"vllm": EngineOptions(), "sglang": EngineOptions(python)}
    tokenizer = load_tokenizer(ModelSpec("m", str(folder)), limits(), engines)
    assert isinstance(tokenizer, HfTokenizer)
    return tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return build_unknown_family(tmp_path / "model")


def test_without_transformers_the_reason_names_what_to_install(folder: Path) -> None:
    tokenizer = load(folder, "")
    assert not tokenizer.media_rules
    assert tokenizer.no_images == INSTALL


def test_answers_of_the_processor_are_kept_by_size(folder: Path, tmp_path: Path) -> None:
    tokenizer = load(folder, write_image_processor(tmp_path / "python"))
    try:
        rule = tokenizer.media_rules[MediaKind.IMAGE]
        assert isinstance(rule, ImageRule), tokenizer.no_images
        assert rule.blocks
        first = rule.ids(30, 40)
        assert first[0] == 30
        assert rule.ids(30, 41)[1] == first[1] + 1
        assert rule.ids(30, 40) == first
        for _ in range(2):
            with pytest.raises(ValueError, match=r"is refused by the model's processor: too wide"):
                rule.ids(501, 1)
    finally:
        tokenizer.close()


def test_processor_whose_tokens_depend_on_more_than_the_size_is_not_used(folder: Path, tmp_path: Path) -> None:
    tokenizer = load(folder, write_image_processor(tmp_path / "python", "the tokens depend on the moon"))
    assert not tokenizer.media_rules
    assert tokenizer.no_images == "The model's own processor cannot be used: the tokens depend on the moon."


def test_processor_whose_placeholder_the_template_does_not_write_is_not_used(folder: Path, tmp_path: Path) -> None:
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text().replace("<pic>", "<other>"))
    tokenizer = load(folder, write_image_processor(tmp_path / "python"))
    assert not tokenizer.media_rules
    assert "writes no placeholder" in tokenizer.no_images
