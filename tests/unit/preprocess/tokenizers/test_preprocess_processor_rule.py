from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from services.common.models import ModelSpec
from services.preprocess.tokenizers.engine import EngineOptions
from services.preprocess.tokenizers.hf import HfTokenizer
from services.preprocess.tokenizers.loading import load_tokenizer
from services.preprocess.tokenizers.processor_rule import INSTALL
from tests.support.data.loaded_tokenizers import limits
from tests.support.data.tiny_models import build_tiny_model
from tests.support.repository import ROOT

FAKE = """#!{python}
import sys
sys.path.insert(0, {root!r})
from services.common.child_rpc.child import Channel, serve
import json
channel = Channel.of_stdio()
channel.send_json({{"facts": {{"placeholders": ["<unwritten>", "<pic>"]}}}})
calls = 0
def reply(request):
    global calls
    verb, argument = json.loads(request)
    assert argument["placeholder"] == "<pic>"
    calls += 1
    if verb == "problem":
        return json.dumps([{problem!r}, None]).encode()
    if argument["width"] > 500:
        return json.dumps([{{"refused": "too wide"}}, None]).encode()
    return json.dumps([{{"ids": [argument["width"], calls]}}, None]).encode()
serve(channel, reply)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model with a processor that preprocess has no rule of."""
    model = build_tiny_model(tmp_path / "model")
    file = model / "tokenizer.json"
    content = json.loads(file.read_text())
    added = max(entry["id"] for entry in content["added_tokens"])
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    content["added_tokens"].append({"id": added + 1000, "content": "<pic>", "special": True, **flags})
    content["model"]["vocab"]["<pic>"] = added + 1000
    file.write_text(json.dumps(content))
    (model / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": "AbacusImageProcessor"}))
    (model / "chat_template.jinja").write_text(
        "{% for m in messages %}{% for p in m.content %}{{ '<pic>' if p.type == 'image' else p.text }}{% endfor %}"
        "{% endfor %}"
    )
    return model


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


def fake_python(tmp_path: Path, problem: str = "") -> str:
    file = tmp_path / "python"
    file.write_text(FAKE.format(python=sys.executable, root=str(ROOT), problem=problem))
    file.chmod(0o755)
    return str(file)


def test_without_transformers_the_reason_names_what_to_install(folder: Path) -> None:
    tokenizer = load(folder, "")
    assert tokenizer.image_rule is None
    assert tokenizer.no_images == INSTALL


def test_answers_of_the_processor_are_kept_by_size(folder: Path, tmp_path: Path) -> None:
    tokenizer = load(folder, fake_python(tmp_path))
    try:
        rule = tokenizer.image_rule
        assert rule is not None, tokenizer.no_images
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
    tokenizer = load(folder, fake_python(tmp_path, "the tokens depend on the moon"))
    assert tokenizer.image_rule is None
    assert tokenizer.no_images == "The model's own processor cannot be used: the tokens depend on the moon."


def test_processor_whose_placeholder_the_template_does_not_write_is_not_used(folder: Path, tmp_path: Path) -> None:
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text().replace("<pic>", "<other>"))
    tokenizer = load(folder, fake_python(tmp_path))
    assert tokenizer.image_rule is None
    assert "writes no placeholder" in tokenizer.no_images
