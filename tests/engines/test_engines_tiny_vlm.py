"""The tiny vision-language models of the tests, as transformers itself loads them."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.engines.engine_suite import interpreter
from tests.support.data.tiny_vlm import LLAVA_TOKENS_PER_IMAGE, build_llava, build_qwen2_vl

pytestmark = pytest.mark.engines

BUILDERS = {"llava": build_llava, "qwen2-vl": build_qwen2_vl}


@pytest.mark.parametrize(
    ("kind", "tokens"),
    [
        ("llava", [LLAVA_TOKENS_PER_IMAGE, LLAVA_TOKENS_PER_IMAGE]),
        ("qwen2-vl", [4 * 3, 3 * 6]),
    ],
)
def test_transformers_loads_every_weight_and_answers_by_the_pictures(
    kind: str, tokens: list[int], tmp_path: Path
) -> None:
    script = Path(__file__).with_name("offline_vision.py")
    folder = BUILDERS[kind](tmp_path / kind)
    done = subprocess.run(
        [interpreter("transformers"), str(script), str(folder)],
        env={"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["missing"], found["unexpected"]) == ([], [])
    assert found["counted"] == tokens
    assert found["placeholders"] == sum(tokens)
    first, again, swapped = found["answers"]
    assert first == again
    assert first != swapped
