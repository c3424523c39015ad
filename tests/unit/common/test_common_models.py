"""Models: names, sources, and the files that decide token ids."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.base.errors import ErrorKind, SluiceError
from services.common.packages import model_files as models
from services.common.packages.model_files import ModelSpec
from tests.support.oracles.errors import raises_error

NAMES = st.text(st.characters(codec="ascii", categories=["L", "N"], include_characters="-_./"), min_size=1)


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("org/name", ModelSpec("org/name", "org/name")),
        ("mine=org/name", ModelSpec("mine", "org/name")),
        ("mine=org/name@hf", ModelSpec("mine", "org/name", "hf")),
        ("mine=org/name@my.package:Class", ModelSpec("mine", "org/name", "my.package:Class")),
        (models.DEFAULT_SOURCE, ModelSpec("tekken", models.DEFAULT_SOURCE)),
        ("mistral-common:tekken_240718", ModelSpec("tekken_240718", "mistral-common:tekken_240718")),
        ("=org/name", ModelSpec("org/name", "org/name")),
    ],
)
def test_parse(text: str, spec: ModelSpec) -> None:
    assert ModelSpec.parse(text) == spec


@pytest.mark.parametrize(("text", "message"), [("", "no source"), ("a=", "no source"), ("a=b@word", "hf, mistral")])
def test_parse_refuses(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelSpec.parse(text)


@given(NAMES, NAMES, st.sampled_from(["", "hf", "mistral"]))
def test_text_form_reads_back(name: str, source: str, processor: str) -> None:
    spec = ModelSpec(name, source, processor)
    assert ModelSpec.parse(str(spec)) == spec


def test_folder_is_named_after_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "llama"
    folder.mkdir()
    assert models.default_name(str(folder)) == "llama"
    monkeypatch.chdir(folder)
    assert models.default_name(".") == "llama"


def test_bundled_tokenizer_is_found() -> None:
    path = models.resolve(models.DEFAULT_SOURCE)
    assert path.is_file()
    assert models.detect_processor(path) == "mistral"
    assert models.tokenizer_files(path) == [path]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("mistral-common:none", "tekken_240911"),
        ("./none", "./none"),
        ("/none/at/all", "/none/at/all"),
        ("~unknown-here/none", "~unknown-here/none"),
    ],
)
def test_missing_source_is_named(source: str, message: str) -> None:
    with raises_error(match=message, kind=ErrorKind.NOT_FOUND):
        models.resolve(source)


def test_hub_that_cannot_be_reached_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*_: object, **__: object) -> str:
        raise ConnectionError("many lines\nof a library")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    with pytest.raises(SluiceError, match="org/name") as refused:
        models.resolve("org/name")
    assert "\n" not in refused.value.message


def test_home_folder_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "m").mkdir()
    assert models.resolve("~/m") == (tmp_path / "m").resolve()


@pytest.mark.parametrize(
    ("files", "processor"),
    [
        (["tokenizer.json"], "hf"),
        (["tokenizer.json", "tekken.json"], "hf"),
        (["tekken.json"], "mistral"),
        (["tokenizer.model.v3"], "mistral"),
    ],
)
def test_processor_by_files(tmp_path: Path, files: list[str], processor: str) -> None:
    for name in files:
        (tmp_path / name).write_text("{}")
    assert models.detect_processor(tmp_path) == processor


def test_folder_without_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_text("")
    with pytest.raises(SluiceError, match="contains no tokenizer"):
        models.detect_processor(tmp_path)
    assert models.tokenizer_files(tmp_path) == []


def test_fingerprint_is_of_tokenizer_files_alone(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "tokenizer.model.v3").write_text("x")
    first = models.fingerprint(tmp_path)
    (tmp_path / "model.safetensors").write_text("weights")
    assert models.fingerprint(tmp_path) == first
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    second = models.fingerprint(tmp_path)
    (tmp_path / "chat_template.jinja").rename(tmp_path / "added_tokens.json")
    assert len({first, second, models.fingerprint(tmp_path)}) == 3


def test_read_json(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"a": 1}')
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "list.json").write_text("[]")
    assert models.read_json(tmp_path, "config.json") == {"a": 1}
    assert models.read_json(tmp_path, "missing.json") == {}
    assert models.read_json(tmp_path / "config.json", "config.json") == {}
    for name in ("broken.json", "list.json"):
        with raises_error(match=name, kind=ErrorKind.INVALID_ARGUMENT):
            models.read_json(tmp_path, name)
