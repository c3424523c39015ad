from __future__ import annotations

from pathlib import Path

import pytest

from services.common.models import DEFAULT_NAME, DEFAULT_SOURCE, ModelSpec
from services.preprocess.encoders.backend import EncoderOptions
from services.preprocess.settings import PreprocessSettings


def test_the_default_works_offline() -> None:
    assert PreprocessSettings.load([]).served == [ModelSpec(DEFAULT_NAME, DEFAULT_SOURCE)]


def test_models_come_as_flags_or_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [ModelSpec("a", "/x"), ModelSpec("b", "/y", "hf")]
    assert PreprocessSettings.load(["--models", "a=/x", "--models", "b=/y@hf"]).served == expected
    monkeypatch.setenv("SLUICE_PREPROCESS_MODELS", "a=/x,b=/y@hf")
    assert PreprocessSettings.load([]).served == expected


def test_chat_templates_and_speed() -> None:
    settings = PreprocessSettings.load(["--models", "a=/x,b=/y", "--chat-templates", "b=/t=1.jinja", "--cache-mb", "0"])
    assert (settings.template_file("a"), settings.template_file("b")) == (None, Path("/t=1.jinja"))
    assert settings.encoder_options == EncoderOptions(fast_backend=True, cache_bytes=0)
    assert PreprocessSettings.load(["--no-fast-tokenizers"]).encoder_options == EncoderOptions(fast_backend=False)


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--models", "a=/x@banana"], "processor 'banana' is unknown"),
        (["--models", "a="], "has no source"),
        (["--models", "a=/x,a=/y"], "lists a more than once"),
        (["--models", ""], "at least 1 item"),
        (["--tokenize-threads", "0"], "--tokenize-threads"),
        (["--max-prompt-mb", "0"], "--max-prompt-mb"),
        (["--chat-templates", "x.jinja"], "is not NAME=FILE"),
        (["--chat-templates", "other=x.jinja"], "the name of a served model"),
    ],
)
def test_bad_flags_are_one_sentence_and_exit_2(
    argv: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        PreprocessSettings.load(argv)
    assert caught.value.code == 2
    printed = capsys.readouterr().err
    assert sentence in printed
    assert printed.count("\n") == 1
