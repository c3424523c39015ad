"""Embeddings with the official client."""

from __future__ import annotations

import httpx
import openai
import pytest

from tests.support.servers.suite import Suite


def test_floats_and_base64_are_the_same_vectors(client: openai.OpenAI) -> None:
    texts = ["A heron stands in the reeds.", "Schleuse 🚢"]
    as_client_likes = client.embeddings.create(model="tekken", input=texts)  # asks for base64 by itself
    as_floats = client.embeddings.create(model="tekken", input=texts, encoding_format="float")
    for one, other in zip(as_client_likes.data, as_floats.data, strict=True):
        assert one.embedding == pytest.approx(other.embedding)
    assert [entry.index for entry in as_floats.data] == [0, 1]
    assert (as_floats.object, as_floats.data[0].object, as_floats.model) == ("list", "embedding", "tekken")
    assert as_floats.usage.prompt_tokens == as_floats.usage.total_tokens > 10
    raw = client.embeddings.with_raw_response.create(model="tekken", input="x", encoding_format="base64")
    assert isinstance(raw.http_response.json()["data"][0]["embedding"], str)


def test_dimensions(client: openai.OpenAI) -> None:
    whole = client.embeddings.create(model="tekken", input="river").data[0].embedding
    short = client.embeddings.create(model="tekken", input="river", dimensions=8).data[0].embedding
    assert len(short) == 8 < len(whole)
    assert sum(value * value for value in short) == pytest.approx(1, abs=1e-3)


def test_many_inputs_keep_their_order(client: openai.OpenAI) -> None:
    texts = [f"text number {index}" for index in range(600)]
    together = client.embeddings.create(model="tekken", input=texts).data
    assert [entry.index for entry in together] == list(range(600))
    for index in (0, 255, 256, 599):
        alone = client.embeddings.create(model="tekken", input=texts[index]).data[0].embedding
        assert together[index].embedding == pytest.approx(alone, abs=1e-6)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": [1, "a"]}, "input"),
        ({"input": [2_000_000_000]}, "input"),
        ({"input": "word " * 140_000}, "input"),
        ({"input": ["x"] * 3000}, "input"),
        ({"dimensions": 0}, "dimensions"),
        ({"dimensions": 60_000}, "dimensions"),
        ({"encoding_format": "hex"}, "encoding_format"),
    ],
)
def test_mistakes_name_their_field(client: openai.OpenAI, fields: dict[str, object], param: str) -> None:
    arguments = {"input": "x", "encoding_format": "float", **fields}
    with pytest.raises(openai.BadRequestError) as caught:
        client.embeddings.create(model="tekken", **arguments)  # type: ignore[arg-type]
    assert caught.value.param == param


def test_score_of_texts_is_the_cosine_of_their_vectors(client: openai.OpenAI, suite: Suite) -> None:
    texts = ["river", "mountain", "river"]
    vectors = [entry.embedding for entry in client.embeddings.create(model="tekken", input=texts).data]
    body = {"text_1": "river", "text_2": texts}
    answer = httpx.post(f"{suite.url}/v1/score", json=body).json()
    expected = [sum(one * other for one, other in zip(vectors[0], vector, strict=True)) for vector in vectors]
    assert [entry["score"] for entry in answer["data"]] == pytest.approx(expected, abs=1e-4)
    assert answer["data"][2]["score"] == pytest.approx(1, abs=1e-4)
    assert answer["usage"]["prompt_tokens"] > 0
    each = httpx.post(f"{suite.url}/v1/score", json={"text_1": texts, "text_2": texts}).json()
    assert [entry["score"] for entry in each["data"]] == pytest.approx([1, 1, 1], abs=1e-4)


def test_rerank_returns_the_most_relevant_documents_first(suite: Suite) -> None:
    body = {"query": "river", "documents": ["mountain", {"text": "river"}, "sea"]}
    answer = httpx.post(f"{suite.url}/v1/rerank", json=body).json()
    assert answer["results"][0]["index"] == 1
    assert answer["results"][0]["document"] == {"text": "river"}
    scores = [entry["relevance_score"] for entry in answer["results"]]
    assert scores == sorted(scores, reverse=True)
    best = httpx.post(f"{suite.url}/v1/rerank", json={**body, "top_n": 1, "return_documents": False}).json()
    assert [entry.keys() for entry in best["results"]] == [{"index", "relevance_score"}]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/rerank", {"query": "x", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "x"}, "documents"),
        ("/v1/rerank", {"query": "", "documents": ["a"]}, "query"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1"),
    ],
)
def test_texts_that_cannot_be_compared_are_refused_by_field(
    suite: Suite, path: str, body: dict[str, object], param: str
) -> None:
    answer = httpx.post(f"{suite.url}{path}", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
