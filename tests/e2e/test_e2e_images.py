"""Images through the whole suite: the mock engine describes each picture that it got."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest
from PIL import Image

from tests.support.clients.chat_answers import cached_tokens, text_of
from tests.support.clients.image_parts import described_file as described
from tests.support.data.tiny_vlm import build_qwen2_vl
from tests.support.oracles.scraped import METRICS_EVERYWHERE, endpoints, families, value
from tests.support.servers.suite import Suite

MODEL = "tekken"
PROCESSES = 6  # gateway, preprocess, router, postprocess and two workers


def picture(width: int = 64, height: int = 48, color: str = "#ff0000") -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height), color).save(file, "PNG")
    return file.getvalue()


RED, BLUE = picture(), picture(color="#0000ff")
BOTH = f"{described(RED)}; {described(BLUE)}"


def url_of(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def image_url(data: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url_of(data)}}


def block(data: bytes) -> dict[str, Any]:
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(data).decode()}
    return {"type": "image", "source": source}


@pytest.fixture(scope="module")
def suite() -> Iterator[Suite]:
    with Suite(env={"SLUICE_WORKER_ENGINE_ARGS": "media=image", **METRICS_EVERYWHERE}) as suite:
        yield suite


@pytest.fixture(scope="module")
def url(suite: Suite) -> str:
    return suite.url


@pytest.fixture(scope="module")
def vision_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = build_qwen2_vl(tmp_path_factory.mktemp("vision"))
    with Suite("--model", str(folder), "--model-name", "vision", "--workers", "1") as suite:
        yield suite.url


def chat(url: str, *parts: Any, **more: Any) -> dict[str, Any]:
    body = {"model": MODEL, "max_tokens": 60, "messages": [{"role": "user", "content": list(parts)}], **more}
    return dict(httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).raise_for_status().json())


def shown(url: str, request_id: str) -> dict[str, Any]:
    return dict(httpx.get(f"{url}/ui/data/requests/{request_id}").raise_for_status().json())


def test_model_lists_image_among_its_modalities(url: str) -> None:
    assert httpx.get(f"{url}/v1/models/{MODEL}").json()["modalities"] == ["text", "image"]


def test_openai_client_sends_images_and_the_order_is_kept(url: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="unused")
    parts: Any = [{"type": "text", "text": "Compare."}, image_url(RED), image_url(BLUE)]
    messages: Any = [{"role": "user", "content": parts}]
    answer = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=80)
    assert str(answer.choices[0].message.content).startswith(BOTH)
    parts_of_response: Any = [
        {"type": "input_image", "image_url": url_of(data), "detail": "auto"} for data in (RED, BLUE)
    ]
    response = client.responses.create(
        model=MODEL, input=[{"role": "user", "content": parts_of_response}], max_output_tokens=80
    )
    assert response.output_text.startswith(BOTH)
    following = client.responses.create(
        model=MODEL, input="And now?", previous_response_id=response.id, max_output_tokens=80
    )
    assert following.output_text.startswith(BOTH)


@pytest.mark.parametrize("label", ["image/png", "image/jpeg", "image/gif", "image/*", "application/octet-stream", ""])
def test_image_is_taken_for_what_it_contains_whatever_its_label(url: str, label: str) -> None:
    data_url = f"data:{label};base64,{base64.b64encode(RED).decode()}"
    answer = chat(url, {"type": "image_url", "image_url": {"url": data_url}})
    assert described(RED) in text_of(answer)
    content = [{"type": "input_image", "image_url": data_url, "detail": "auto"}]
    body = {"model": MODEL, "max_output_tokens": 60, "input": [{"role": "user", "content": content}]}
    response = httpx.post(f"{url}/v1/responses", json=body, timeout=60).raise_for_status().json()
    assert described(RED) in response["output"][-1]["content"][0]["text"]
    if label in ("image/jpeg", "image/gif"):
        source = {"type": "base64", "media_type": label, "data": base64.b64encode(RED).decode()}
        messages = [{"role": "user", "content": [{"type": "image", "source": source}]}]
        message = httpx.post(f"{url}/v1/messages", json={"model": MODEL, "max_tokens": 60, "messages": messages})
        assert described(RED) in message.raise_for_status().json()["content"][0]["text"]


def test_anthropic_client_sends_images_in_order(url: str) -> None:
    client = anthropic.Anthropic(base_url=url, api_key="unused")
    messages: Any = [{"role": "user", "content": [block(RED), {"type": "text", "text": "and"}, block(BLUE)]}]
    message = client.messages.create(model=MODEL, max_tokens=80, messages=messages)
    assert message.content[0].type == "text"
    assert message.content[0].text.startswith(BOTH)


def test_images_in_tool_results_reach_a_model_whose_template_takes_them(vision_url: str) -> None:
    client = anthropic.Anthropic(base_url=vision_url, api_key="unused")
    messages: Any = [
        {"role": "user", "content": [block(RED)]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": [block(BLUE)]}]},
    ]
    message = client.messages.create(model="vision", max_tokens=80, messages=messages)
    assert message.content[0].type == "text"
    assert message.content[0].text.startswith(BOTH)


def test_the_same_picture_is_cached_and_another_of_the_same_size_is_not(url: str) -> None:
    words = {"type": "text", "text": "Describe this picture in detail. " * 20}
    green, olive = picture(color="#00ff00"), picture(color="#808000")
    first = chat(url, image_url(green), words)
    again = chat(url, image_url(green), words)
    other = chat(url, image_url(olive), words)
    assert first["usage"]["prompt_tokens"] == again["usage"]["prompt_tokens"] == other["usage"]["prompt_tokens"]
    assert cached_tokens(again) > 0
    assert cached_tokens(other) < 32


def test_metrics_count_items_hits_and_files(suite: Suite) -> None:
    urls = endpoints(suite.output, PROCESSES)
    names = {
        "items": ("sluice_gateway_media_items_total", {"result": "hit"}),
        "items in all": ("sluice_gateway_media_items_total", {}),
        "predicted": ("sluice_router_media_items_total", {"result": "hit"}),
        "predicted in all": ("sluice_router_media_items_total", {}),
        "files": ("sluice_gateway_media_files_total", {"sent": "first"}),
        "bytes": ("sluice_gateway_media_bytes_total", {}),
        "stored": ("sluice_worker_media_files_total", {"outcome": "stored"}),
        "encoder tokens": ("sluice_preprocess_encoder_tokens_total", {}),
        "refused": ("sluice_gateway_media_rejected_total", {"reason": "invalid_media"}),
        "rejected": ("sluice_preprocess_media_rejected_total", {"reason": "invalid_media"}),
    }

    def counts() -> dict[str, float]:
        scraped = [families(each) for each in urls]
        return {key: sum(value(found, name, **labels) for found in scraped) for key, (name, labels) in names.items()}

    words = {"type": "text", "text": "Describe this picture in detail. " * 20}
    pink = picture(color="#ffc0cb")
    before = counts()
    tokens = shown(suite.url, chat(suite.url, image_url(pink), words)["id"])["encoder_tokens"]
    chat(suite.url, image_url(pink), words)
    with pytest.raises(httpx.HTTPStatusError):
        chat(suite.url, image_url(b"not a picture"))
    with pytest.raises(httpx.HTTPStatusError):
        chat(suite.url, {"type": "image_url", "image_url": {"url": "data:image/png;base64,?"}})
    after = counts()
    assert {key: after[key] - before[key] for key in names} == {
        "items": 1,
        "items in all": 2,
        "predicted": 1,
        "predicted in all": 2,
        "files": 1,
        "bytes": len(pink),
        "stored": 1,
        "encoder tokens": 2 * tokens,
        "refused": 2,
        "rejected": 1,
    }


@pytest.mark.parametrize("n", [1, 3])
def test_choices_all_describe_the_picture(url: str, n: int) -> None:
    answer = chat(url, image_url(RED), n=n)
    assert len(answer["choices"]) == n
    assert all(choice["message"]["content"].startswith(described(RED)) for choice in answer["choices"])


def test_as_many_images_as_the_gateway_accepts_are_served(url: str) -> None:
    files = [picture(8 + side, 8) for side in range(100)]
    assert text_of(chat(url, *map(image_url, files))).startswith(described(files[0]))


@pytest.mark.parametrize(
    ("part", "status", "code"),
    [
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,%%"}}, 400, "invalid_media"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}, 400, None),
        ({"type": "image_url", "image_url": {"url": "http://example.org/a.png"}}, 400, "invalid_media"),
        ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, 400, "invalid_media"),
        ({"type": "image_url", "image_url": {"url": "https://127.0.0.1/a.png"}}, 400, None),
        ({"type": "video_url", "video_url": {"url": url_of(RED)}}, 400, "invalid_media"),
        ({"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}, 400, "media_not_supported"),
    ],
)
def test_bad_part_is_refused_by_name(url: str, part: Any, status: int, code: str | None) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, part]}]}
    response = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    assert response.status_code == status
    error = response.json()["error"]
    assert error["param"] == "messages[0].content[1]"
    assert code is None or error["code"] == code
