"""Models that classify: /v1/classify, and scores of pairs of texts by a model with one class."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.data.tiny_models import build_tiny_model
from tests.support.servers.suite import Suite

LABELS = ("good", "bad", "neither")


@pytest.fixture(scope="module")
def comparing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Suite]:
    """A model that compares texts; the mock's score is the share of the first text's tokens that the second one has."""
    model = build_tiny_model(tmp_path_factory.mktemp("models") / "tiny")
    classes = {"SLUICE_WORKER_ENGINE_ARGS": "labels=relevant"}
    with Suite("--workers", "1", "--model", str(model), env=classes) as running:
        yield running


def post(suite: Suite, path: str, **fields: Any) -> httpx.Response:
    return httpx.post(suite.url + path, json=fields, timeout=60)


def test_texts_and_their_tokens_have_the_same_class(classifying_suite: Suite) -> None:
    ids = post(classifying_suite, "/tokenize", prompt="river").json()["tokens"]
    answer = post(classifying_suite, "/v1/classify", model="tekken", input=["river", "lake"]).json()
    by_ids = post(classifying_suite, "/v1/classify", model="tekken", input=[ids]).json()
    assert answer["data"][0] == by_ids["data"][0]
    assert [entry["index"] for entry in answer["data"]] == [0, 1]
    for entry in answer["data"]:
        assert entry["label"] == LABELS[max(range(3), key=entry["probs"].__getitem__)]
        assert (entry["num_classes"], len(entry["probs"])) == (3, 3)
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] > len(ids)


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/classify", {"input": []}, "input"),
        ("/v1/classify", {"input": "hi", "priority": 3}, "priority"),
        ("/v1/classify", {"input": "hi", "model": "unknown"}, "model"),
        ("/v1/embeddings", {"input": "hi"}, "model"),
        ("/v1/score", {"text_1": "a", "text_2": "b"}, "model"),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}, "model"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents"),
    ],
)
def test_what_a_classifying_model_cannot_do_is_refused(
    classifying_suite: Suite, path: str, fields: dict[str, Any], param: str
) -> None:
    answer = post(classifying_suite, path, **{"model": "tekken", **fields})
    assert answer.status_code in (400, 404)
    assert answer.json()["error"]["param"] == param


def test_model_that_embeds_does_not_classify(suite: Suite) -> None:
    answer = post(suite, "/v1/classify", model="tekken", input="hi")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model")


def test_model_with_one_class_scores_pairs(comparing: Suite) -> None:
    same, other = "a heron stands", "zzz qqq"
    scores = post(comparing, "/v1/score", model="tiny", text_1=same, text_2=[same, other]).json()
    assert [entry["score"] for entry in scores["data"]] == [pytest.approx(1), pytest.approx(0, abs=0.7)]
    assert scores["data"][1]["score"] < 1
    ranked = post(comparing, "/v1/rerank", model="tiny", query=same, documents=[other, same], top_n=1).json()
    assert [(entry["index"], entry["relevance_score"]) for entry in ranked["results"]] == [(1, pytest.approx(1))]
    assert ranked["usage"]["total_tokens"] == scores["usage"]["total_tokens"]


@pytest.mark.parametrize("side", ["left", "right"])
def test_pairs_are_truncated_on_request(comparing: Suite, side: str) -> None:
    fields: dict[str, Any] = {"text_1": "a heron stands", "text_2": "a heron stands in the reeds"}
    cut = post(comparing, "/v1/score", model="tiny", **fields, truncate_prompt_tokens=3, truncation_side=side)
    assert cut.json()["usage"]["prompt_tokens"] == 3
