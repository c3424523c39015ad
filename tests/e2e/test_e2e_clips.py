"""Audio and videos through the whole suite: the mock engine names each file that it got."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from hashlib import sha256
from time import monotonic, sleep
from typing import Any

import httpx
import openai
import pytest

from tests.support.clients.chat_answers import cached_tokens, text_of
from tests.support.clients.image_parts import described, image_url, picture, user_message
from tests.support.data.clips import audio_file, video_file
from tests.support.data.tiny_audio import build_qwen2_audio
from tests.support.data.tiny_vlm import build_qwen2_vl
from tests.support.oracles.scraped import METRICS_EVERYWHERE, endpoints, families, value
from tests.support.servers.suite import Suite

MODEL, DEFAULT = "clips", "tekken"
BLOCK = 16
PROCESSES = 6  # gateway, preprocess, router, postprocess and two workers
HIGH, LOW = (audio_file(2.0, pitch=pitch) for pitch in (880.0, 220.0))
RED, BLUE = (video_file(112, 112, 20, color=color) for color in ((255, 0, 0), (0, 0, 255)))
COLOR = (200, 30, 60)
PICTURE = picture(COLOR)


def base64_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


def input_audio(data: bytes, form: str = "wav") -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": base64_of(data), "format": form}}


def video_url(data: bytes, media_type: str = "video/mp4") -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": f"data:{media_type};base64,{base64_of(data)}"}}


def named(kind: str, data: bytes) -> str:
    return f"{kind} {len(data)} bytes {sha256(data).hexdigest()[:8]}"


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Suite]:
    folder = build_qwen2_audio(tmp_path_factory.mktemp("audio"))
    with Suite("--model", str(folder), "--model-name", MODEL, env=METRICS_EVERYWHERE) as suite:
        yield suite


@pytest.fixture(scope="module")
def audio_url(suite: Suite) -> str:
    return suite.url


@pytest.fixture(scope="module")
def vision_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = build_qwen2_vl(tmp_path_factory.mktemp("vision"))
    with Suite("--model", str(folder), "--model-name", MODEL) as suite:
        yield suite.url


def asked(url: str, *parts: Any, **more: Any) -> httpx.Response:
    body = {"model": MODEL, "max_tokens": 100, "messages": [user_message(*parts)], **more}
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)


def chat(url: str, *parts: Any, **more: Any) -> dict[str, Any]:
    return dict(asked(url, *parts, **more).raise_for_status().json())


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def test_models_list_the_kinds_that_engine_and_tokenizer_take(audio_url: str, vision_url: str) -> None:
    assert httpx.get(f"{audio_url}/v1/models/{MODEL}").json()["modalities"] == ["text", "audio"]
    assert httpx.get(f"{vision_url}/v1/models/{MODEL}").json()["modalities"] == ["text", "image", "video"]


def test_model_whose_tokenizer_takes_no_audio_does_not_list_it_though_the_engine_does() -> None:
    with Suite("--workers", "1", env={"SLUICE_WORKER_ENGINE_ARGS": '{"media": ["image", "audio"]}'}) as suite:
        modalities: list[str] = []
        deadline = monotonic() + 20  # the gateway asks preprocess again while it loads
        while modalities != ["text", "image"] and monotonic() < deadline:
            sleep(0.2)
            modalities = httpx.get(f"{suite.url}/v1/models/{DEFAULT}").json()["modalities"]
        assert modalities == ["text", "image"]
        body = {"model": DEFAULT, "messages": [{"role": "user", "content": [input_audio(HIGH)]}]}
        refused = httpx.post(f"{suite.url}/v1/chat/completions", json=body, timeout=60)
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert (error["param"], error["code"]) == ("messages[0].content[0]", "media_not_supported")


def test_openai_client_sends_audio_and_the_order_is_kept(audio_url: str) -> None:
    client = openai.OpenAI(base_url=f"{audio_url}/v1", api_key="unused")
    forms = {form: audio_file(0.5, form) for form in ("WAV", "MP3", "FLAC", "OGG")}
    parts: Any = [text("Compare."), *(input_audio(data, form.lower()) for form, data in forms.items())]
    answer = client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": parts}], max_tokens=150)
    expected = "; ".join(named("audio", data) for data in forms.values())
    assert str(answer.choices[0].message.content).startswith(expected)


def test_responses_take_audio_and_keep_it_for_the_next_turn(audio_url: str) -> None:
    client = openai.OpenAI(base_url=f"{audio_url}/v1", api_key="unused")
    given: Any = [{"role": "user", "content": [input_audio(HIGH)]}]
    first = client.responses.create(model=MODEL, input=given, max_output_tokens=60)
    assert first.output_text.startswith(named("audio", HIGH))
    following = client.responses.create(
        model=MODEL, input="And now?", previous_response_id=first.id, max_output_tokens=60
    )
    assert following.output_text.startswith(named("audio", HIGH))


def test_videos_and_images_keep_their_order_and_typed_placeholders_stay_text(vision_url: str) -> None:
    webm = video_file(64, 48, 12, "WEBM")
    typed = text("x <|video_pad|> <|image_pad|> y")
    answer = chat(vision_url, video_url(RED), image_url(COLOR), video_url(webm, "video/webm"), typed)
    names, _, _ = text_of(answer).partition(". You said:")
    first, image, last = names.split("; ")
    assert (first, last) == (named("video", RED), named("video", webm))
    assert image == described(COLOR)
    plain = chat(vision_url, video_url(RED), image_url(COLOR), video_url(webm, "video/webm"), text("x y"))
    assert answer["usage"]["prompt_tokens"] > plain["usage"]["prompt_tokens"] + 10, "each is spelled out as text"


@pytest.mark.parametrize("kind", ["audio", "video"])
def test_repeated_clip_is_cached_and_another_or_swapped_ones_share_only_the_text(
    audio_url: str, vision_url: str, kind: str
) -> None:
    url, part, one, other = (
        (audio_url, input_audio, HIGH, LOW) if kind == "audio" else (vision_url, video_url, RED, BLUE)
    )
    words = text("word " * 40)
    before = chat(url, words, part(one), part(other))
    again = chat(url, words, part(one), part(other))
    assert cached_tokens(again) >= before["usage"]["prompt_tokens"] // BLOCK * BLOCK - BLOCK
    shared = cached_tokens(chat(url, words, part(other), part(one)))
    only_text = cached_tokens(chat(url, words))
    assert shared <= only_text + BLOCK < cached_tokens(again) - 2 * BLOCK
    fresh = audio_file(2.0, pitch=300.0) if kind == "audio" else video_file(112, 112, 20, color=(9, 99, 9))
    changed = cached_tokens(chat(url, words, part(fresh), part(other)))
    assert changed <= only_text + BLOCK


def test_streamed_answer_to_audio_equals_the_whole_one(audio_url: str) -> None:
    client = openai.OpenAI(base_url=f"{audio_url}/v1", api_key="unused")
    messages: Any = [{"role": "user", "content": [input_audio(LOW), text("Hello")]}]
    whole = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=80, seed=5)
    stream = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=80, seed=5, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices) == (
        whole.choices[0].message.content
    )


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        (input_audio(b"RIFF nothing"), "is not in one of the formats WAV, MP3, FLAC, OGG."),
        (input_audio(PICTURE), "is not in one of the formats WAV, MP3, FLAC, OGG."),
        (input_audio(video_file(64, 64, 4)), "is a file of the kind video."),
        (input_audio(audio_file(0.5, "FLAC")), "is declared as audio/wav, but is audio/flac."),
        (input_audio(HIGH[:-100]), "is truncated."),
        (input_audio(audio_file(0.01)), "is too short for a token."),
        ({"type": "input_audio", "input_audio": {"data": "!", "format": "wav"}}, "base64"),
        ({"type": "input_audio", "input_audio": {"data": base64_of(HIGH), "format": "aac"}}, "format must be one of"),
        ({"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}, "is empty"),
        (image_url(COLOR), "takes image input"),
        (video_url(RED), "takes video input"),
    ],
)
def test_bad_audio_is_a_400_that_names_the_part(audio_url: str, part: dict[str, Any], reason: str) -> None:
    response = asked(audio_url, text("Hello"), part)
    assert response.status_code == 400
    error = response.json()["error"]
    assert reason in error["message"]
    assert error["param"].startswith("messages[0].content[1]")


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        (video_url(RED[: len(RED) // 2]), "is truncated."),
        (video_url(video_file(64, 64, 1)), "has a single frame; send it as an image."),
        (video_url(HIGH), "is a file of the kind audio."),
        (video_url(RED, "video/webm"), "is declared as video/webm, but is video/mp4."),
        (video_url(RED, "image/png"), "which is not a type of video"),
        (
            {"type": "video_url", "video_url": {"url": "file:///etc/passwd"}},
            "must be a data URL or begin with https://",
        ),
        ({"type": "video_url", "video_url": {"url": "https://example.com/a.mp4"}}, "this server fetches no media"),
    ],
)
def test_bad_video_is_a_400_that_names_the_part(vision_url: str, part: dict[str, Any], reason: str) -> None:
    response = asked(vision_url, text("Hello"), part)
    assert response.status_code == 400
    error = response.json()["error"]
    assert reason in error["message"]
    assert error["param"].startswith("messages[0].content[1]")


def test_audio_counts_in_the_metrics_and_decisions_as_images_do(suite: Suite) -> None:
    urls = endpoints(suite.output, PROCESSES)

    def totals() -> tuple[float, float]:
        found = [families(each) for each in urls]
        names = ("sluice_preprocess_media_checks_total", "sluice_preprocess_encoder_tokens_total")
        checks, tokens = (sum(value(each, name) for each in found) for name in names)
        return checks, tokens

    before = totals()
    answer = chat(suite.url, input_audio(audio_file(1.0, pitch=555.0)), text("Once"))
    shown = httpx.get(f"{suite.url}/ui/data/requests/{answer['id']}").raise_for_status().json()
    assert (shown["media"], shown["encoder_tokens"]) == (1, 25)
    after = totals()
    assert after[0] - before[0] == 1
    assert after[1] - before[1] == 25
