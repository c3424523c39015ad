"""`sluice tiny-model`: a folder that tokenizers, templates and engines can read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from services.preprocess.contract.tokenizer import ChatRequest
from services.preprocess.limits import Limits
from services.preprocess.tokenizers.hf import HfTokenizer
from services.worker.engines.transformers.folder import read_folder
from sluice.cli.commands import invoke
from sluice.cli.tiny_model import FILES


def test_folder_holds_a_tokenizer_a_template_and_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "models" / "tiny"
    assert invoke(["tiny-model", str(folder)]) == 0
    assert f"sluice up --model {folder}" in capsys.readouterr().out
    assert sorted(path.name for path in folder.iterdir()) == sorted(FILES)
    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    assert size == Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size()
    assert read_folder(str(folder)).weight_bytes > 100_000
    tokenizer = HfTokenizer(folder, Limits.default())
    ids = tokenizer.encode_chat(ChatRequest(messages=[{"role": "user", "content": "Grüße"}]))
    assert tokenizer.decode(ids) == "<|im_start|>user\nGrüße<|im_end|>\n<|im_start|>assistant\n"


def test_second_run_writes_the_same_bytes(tmp_path: Path) -> None:
    assert invoke(["tiny-model", str(tmp_path)]) == 0
    first = {name: (tmp_path / name).read_bytes() for name in FILES}
    assert invoke(["tiny-model", str(tmp_path)]) == 0
    assert {name: (tmp_path / name).read_bytes() for name in FILES} == first


@pytest.mark.parametrize("kind", ["folder with something else", "file"])
def test_place_that_is_taken_is_refused_in_a_sentence(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "taken"
    if kind == "file":
        place.write_text("mine")
    else:
        place.mkdir()
        (place / "thesis.txt").write_text("mine")
    assert invoke(["tiny-model", str(place)]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("sluice: ")
    assert str(place) in printed
    assert (place if kind == "file" else place / "thesis.txt").read_text() == "mine"
