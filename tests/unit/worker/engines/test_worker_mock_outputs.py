"""What the mock engine makes up beside tokens: log-probabilities, embeddings, step times from a table."""

from __future__ import annotations

import json
import math
from array import array
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.errors import SluiceError
from services.worker.engines.mock.embeddings import embed
from services.worker.engines.mock.probabilities import logprobs_at, prompt_logprobs
from services.worker.engines.mock.timing import TableTiming, decode_ms, prefill_ms

VOCABULARY = 1_000


@given(st.integers(0, VOCABULARY - 1), st.integers(0, 100_000), st.integers(0, 50))
def test_logprobs_are_a_distribution_with_the_chosen_token_on_top(token: int, position: int, alternatives: int) -> None:
    found = logprobs_at(token, position, alternatives, VOCABULARY)
    assert found == logprobs_at(token, position, alternatives, VOCABULARY)
    assert (found.chosen.token_id, found.chosen.rank) == (token, 1)
    assert len(found.top) == alternatives
    assert len({one.token_id for one in found.top}) == alternatives
    assert all(0 <= one.token_id < VOCABULARY for one in found.top)
    assert [one.rank for one in found.top] == list(range(1, alternatives + 1))
    assert [one.logprob for one in found.top] == sorted((one.logprob for one in found.top), reverse=True)
    assert sum(math.exp(one.logprob) for one in found.top or (found.chosen,)) <= 1.0
    assert not alternatives or found.top[0] == found.chosen


def test_there_are_no_more_alternatives_than_tokens() -> None:
    assert len(logprobs_at(1, 0, 50, 4).top) == 4


def test_a_prompt_has_an_entry_per_token_and_the_first_says_nothing() -> None:
    first, *rest = prompt_logprobs((5, 6, 7), 2, VOCABULARY)
    assert (first.chosen.token_id, first.chosen.rank, first.top) == (5, 0, ())
    assert [one.chosen.token_id for one in rest] == [6, 7]
    assert rest[0] == logprobs_at(6, 1, 2, VOCABULARY)


def vector(ids: list[int], dimensions: int = 0, lora: str = "") -> list[float]:
    embedded = embed([array("I", ids)], 32, dimensions, lora)
    assert embedded.prompt_tokens == len(ids)
    values = array("f")
    values.frombytes(embedded.vectors[0])
    return list(values)


def test_embeddings_are_unit_vectors_that_depend_on_tokens_and_adapter_alone() -> None:
    one = vector([1, 2, 3])
    assert len(one) == 32
    assert math.isclose(sum(value * value for value in one), 1.0, rel_tol=1e-5)
    assert one == vector([1, 2, 3])
    assert one != vector([1, 2, 4])
    assert one != vector([1, 2, 3], lora="polite")


def test_embeddings_are_cut_and_made_unit_vectors_again() -> None:
    whole, cut = vector([1, 2, 3]), vector([1, 2, 3], dimensions=8)
    assert len(cut) == 8
    assert math.isclose(sum(value * value for value in cut), 1.0, rel_tol=1e-5)
    assert math.isclose(cut[0] / cut[1], whole[0] / whole[1], rel_tol=1e-4)
    with pytest.raises(SluiceError) as refusal:
        vector([1], dimensions=33)
    assert refusal.value.param == "dimensions"


def test_the_published_fit_is_the_one_modelled() -> None:
    assert prefill_ms(1_000) == pytest.approx(4.209989e-7 * 1e6 + 15.18344 + 16.50142)
    assert decode_ms(0.0) == pytest.approx(5.74)
    assert decode_ms(0.5) == pytest.approx(-25.74 * 0.25 + 54.01 * 0.5 + 5.74)
    assert decode_ms(0.0) >= 1.0


@pytest.fixture
def table(tmp_path: Path) -> Path:
    file = tmp_path / "table.json"
    decode = [[1, 0.0, 5], [11, 0.0, 10], [1, 1.0, 15], [11, 1.0, 20]]
    file.write_text(json.dumps({"prefill": [[100, 10], [200, 30]], "decode": decode}))
    return file


@pytest.mark.parametrize(
    ("prefill", "decoding", "use", "ms"),
    [
        (100, 0, 0.0, 10),
        (150, 0, 0.0, 20),
        (10, 0, 0.0, 10),  # before the first point
        (300, 0, 0.0, 50),  # the last line goes on
        (0, 1, 0.0, 5),
        (0, 6, 0.0, 7.5),
        (0, 6, 0.5, 12.5),
        (0, 21, 1.0, 25),
        (150, 6, 0.5, 32.5),
        (0, 0, 0.5, 0),
    ],
)
def test_a_table_is_read_between_its_points(table: Path, prefill: int, decoding: int, use: float, ms: float) -> None:
    assert TableTiming.read(table).step_s(prefill, decoding, use) * 1e3 == pytest.approx(ms)
    assert TableTiming.read(table, speedup=10).step_s(prefill, decoding, use) * 1e4 == pytest.approx(ms)


@pytest.mark.parametrize(
    "content",
    [
        *("", "[]", "{}", '{"prefill": [], "decode": []}', '{"prefill": [[1, 2]], "decode": [[1, "x"]]}'),
        *('{"prefill": [[1, -2]], "decode": [[1, 2]]}', '{"prefill": [[1, 2, 3, 4]], "decode": [[1, 2]]}'),
    ],
)
def test_what_is_no_table_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "broken.json"
    file.write_text(content)
    with pytest.raises(SluiceError) as refusal:
        TableTiming.read(file)
    assert "not a valid timing table" in refusal.value.message
