"""A suite whose tokenizer has the two required methods and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from sluice.cli import tiny_model
from tests.support.servers.suite import Suite

TWO_METHODS = '''
"""A tokenizer of ids that the tiny model has: a letter is its place in the alphabet."""

from sluice.tokenizers import TokenizerProtocol


class Letters(TokenizerProtocol):
    def __init__(self, path): ...

    def tokenize(self, messages, model, tools=None):
        return [5 + ord(letter) % 26 for message in messages for letter in message["content"]]

    def decode(self, token_ids, skip_special_tokens=False):
        return "".join(chr(97 + token % 26) for token in token_ids)
'''
CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "letters.py").write_text(TWO_METHODS)
    (tmp_path / "half.py").write_text(TWO_METHODS.replace("def decode", "def decoding"))
    tiny_model.run(tmp_path / "model")
    return tmp_path / "model"


def _path(folder: Path) -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)}


def test_tokenizer_with_two_methods_serves_chats_from_the_client_to_the_engine(model: Path) -> None:
    flags = ("--workers", "1", "--model", str(model), "--model-name", "mine", "--processor", "letters:Letters")
    with Suite(*flags, env=_path(model.parent)) as suite, httpx.Client(base_url=suite.url, timeout=60) as client:
        answer = client.post("/v1/chat/completions", json={"model": "mine", **CHAT})
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["prompt_tokens"] == 5
        assert answer.json()["choices"][0]["message"]["content"]
        assert client.post("/detokenize", json={"model": "mine", "tokens": [0, 1]}).json()["prompt"] == "ab"
        text = client.post("/v1/completions", json={"model": "mine", "prompt": "hello", "max_tokens": 4})
        assert text.status_code == 400
        assert "encodes chats only" in text.json()["error"]["message"]


def test_preprocess_with_half_a_tokenizer_is_refused_at_start(model: Path) -> None:
    command = [sys.executable, "-m", "services.preprocess", "--models", f"mine={model}@half:Letters"]
    ended = subprocess.run(
        [*command, "--listen", "127.0.0.1:0"],
        env={**os.environ, **_path(model.parent)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 1
    assert "The tokenizer half:Letters lacks the method decode; implement" in ended.stderr
    assert "Traceback" not in ended.stderr
