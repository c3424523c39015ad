"""Audio and videos in the vllm engine: its expansion, its cache by content hash, and what it refuses."""

from __future__ import annotations

import base64
import io
import json
import os
import random
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from tokenizers import Tokenizer

from services.common.base.packing import unpack_u32
from services.common.types.media.spans import MediaKind
from services.preprocess.media.clips.files import check_clip
from services.preprocess.media.expansion import expand
from services.preprocess.media.limits import ClipLimits
from services.preprocess.tokenizers.hf import HfTokenizer
from tests.engines.engine_suite import ROOT, interpreter
from tests.engines.media_chats import media_chats
from tests.support.data.clips import audio_file, timed_video, video_file
from tests.support.data.loaded_tokenizers import limits
from tests.support.data.tiny_audio import AUDIO_TOKEN, build_qwen2_audio
from tests.support.data.tiny_vlm import QWEN_IMAGE_TOKEN, QWEN_VIDEO_TOKEN, build_qwen2_vl

pytestmark = pytest.mark.engines

CLIPS = 50
BLOCK = 32
BUILDERS = {MediaKind.AUDIO: build_qwen2_audio, MediaKind.VIDEO: build_qwen2_vl}
TOKENS = {MediaKind.AUDIO: AUDIO_TOKEN, MediaKind.VIDEO: QWEN_VIDEO_TOKEN}
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_MAX_MEDIA_REQUEST_DECODE_BYTES": "20000000",
    "VLLM_NO_USAGE_STATS": "1",
}


def inside(script: str, question: dict[str, Any]) -> Any:
    """What a script in vLLM's environment answers."""
    done = subprocess.run(
        [interpreter("vllm-cpu"), "-P", str(Path(__file__).with_name(script))],
        input=json.dumps(question),
        env={**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("kind", BUILDERS, ids=lambda kind: kind.capability)
def test_clips_of_worker_server_and_preprocess_have_equal_ids_spans_and_features(
    kind: MediaKind, tmp_path: Path
) -> None:
    folder = BUILDERS[kind](tmp_path / "model")
    tokenizer = HfTokenizer(folder, limits())
    chats = media_chats(kind, CLIPS, 71)
    question = {"model": str(folder), "chats": [chat.messages for chat in chats], "missing": []}
    answers = inside("inside_media_prompts.py", question)["answers"]
    lengths = []
    for chat, answer in zip(chats, answers, strict=True):
        packed, spans = expand(tokenizer.pack_chat(chat.request), tokenizer.media_rules, chat.items)
        assert unpack_u32(packed).tolist() == answer["ids"], chat.items
        found = [[span.kind.capability, span.offset, span.length, number] for number, span in enumerate(spans)]
        assert (answer["spans"], answer["worker"], answer["differs"]) == (found, found, []), chat.items
        lengths += [span.length for span in spans]
    assert len(lengths) == CLIPS
    assert len(set(lengths)) > CLIPS // 4


def damaged(file: bytes, chance: random.Random) -> bytes:
    """A file with a few other bytes, behind those that name its format."""
    other = bytearray(file)
    for _ in range(chance.randint(1, 30)):
        other[chance.randrange(12, len(other))] = chance.randrange(256)
    return bytes(other)


def test_damaged_clips_harm_only_the_process_that_reads_them() -> None:
    chance, times = random.Random(5), range(0, 3_000, 100)
    clips = [("AUDIO", audio_file(0.4, form, 44_100, 2)) for form in ("FLAC", "OGG", "MP3")]
    clips += [("VIDEO", timed_video(times, form, group)) for form in ("MP4", "WEBM") for group in (5, 12)]
    files = [(kind, damaged(file, chance)) for _ in range(150) for kind, file in clips]
    question = {
        "files": [(kind, base64.b64encode(file).decode()) for kind, file in files],
        "good": ("VIDEO", base64.b64encode(clips[-1][1]).decode()),
    }
    found = inside("inside_clip_decoding.py", question)
    assert found["good"] == [[8, 48, 64, 3]] * 2
    shapes = [result for result in found["results"] if isinstance(result, list)]
    assert 100 < len(shapes) < len(files) - 100
    assert any("ended the process" in result for result in found["results"])  # OpenCV's FFmpeg does so


@dataclass
class Prompts:
    """Prompts whose text before, between and after the items is always the same."""

    folder: Path
    kind: MediaKind

    def __post_init__(self) -> None:
        self._tokenizer = Tokenizer.from_file(str(self.folder / "tokenizer.json"))
        self._rule = HfTokenizer(self.folder, limits()).media_rules[self.kind]
        self.words = self._tokenizer.encode("Describe the clips, one after the other.").ids[:6]

    def clip(self, number: int) -> bytes:
        """One of several clips of the same length."""
        if self.kind is MediaKind.AUDIO:
            return audio_file(1.5, "FLAC", 22_050, pitch=200.0 * number)
        return video_file(100, 80, 25, "WEBM", 10, (60 * number, 250 - 60 * number, 90))

    def id_of(self, token: str) -> int:
        """The id of a token."""
        number: int | None = self._tokenizer.token_to_id(token)
        assert number is not None
        return number

    def question(self, *clips: bytes, tail: Sequence[int] = ()) -> dict[str, Any]:
        """A prompt of some clips, and other ids after the text."""
        ids, spans = list(self.words), []
        for clip in clips:
            tokens = self._rule.ids_of(check_clip(clip, ClipLimits())).tolist()
            spans.append([len(ids), len(tokens), tokens[:1]])
            ids += tokens + self.words
        return {
            "ids": ids + self.words * 12 + list(tail),
            "spans": spans,
            "kinds": [self.kind.capability] * len(clips),
            "files": [base64.b64encode(clip).decode() for clip in clips],
            "max_tokens": 8,
        }


def served(folder: Path, questions: list[dict[str, Any]], *flags: str) -> Any:
    """The engine's capabilities and answers."""
    argv = ["--engine", "vllm", "--model", f"tiny={folder}", "--block-size", str(BLOCK), "--"]
    argv += ["--max-model-len", "1024", "--dtype", "float32", "--enforce-eager", *flags]
    return inside("inside_media.py", {"argv": argv, "requests": questions})


@pytest.mark.parametrize("kind", BUILDERS, ids=lambda kind: kind.capability)
def test_vllm_with_clips_caches_and_reports_by_content_and_refuses_a_wrong_expansion(
    kind: MediaKind, tmp_path: Path
) -> None:
    prompts = Prompts(BUILDERS[kind](tmp_path / "model"), kind)
    one, two, three = map(prompts.clip, (1, 2, 3))
    good = prompts.question(one, two)
    longer = {**good, "spans": [good["spans"][0], [good["spans"][1][0] - 1, good["spans"][1][1] + 1, [9]]]}
    refused = [
        {**good, "spans": good["spans"][:1], "files": good["files"][:1]},
        {**good, "spans": [*good["spans"], [len(good["ids"]) - 1, 1, []]], "files": [*good["files"], good["files"][0]]},
        {**good, "files": [good["files"][0], base64.b64encode(b"no clip").decode()]},
        {**good, "files": [good["files"][0], base64.b64encode(one[: len(one) // 50]).decode()]},
        prompts.question(one, two, tail=(prompts.id_of(TOKENS[kind]),)),
        longer,
    ]
    if kind is MediaKind.VIDEO:
        refused.append(prompts.question(one, two, tail=(prompts.id_of(QWEN_IMAGE_TOKEN),)))
        refused.append({**prompts.question(one), "files": [base64.b64encode(video_file(100, 80, 1)).decode()]})
        refused.append(prompts.question(one, video_file(1_200, 1_000, 45)))  # 8 frames of 3.6 MB
    else:
        refused.append({**prompts.question(one), "files": [base64.b64encode(audio_file(0.01)).decode()]})
    for question in refused:
        question["kinds"] = [kind.capability] * len(question["files"])
    swapped, other = prompts.question(two, one), prompts.question(one, three)
    found = served(prompts.folder, [good, good, swapped, other, *refused, good])
    assert kind.capability in found["capabilities"]
    first, again, after_swap, second_differs, *rejected, last = found["answers"]
    for answer in (first, again, after_swap, second_differs, last):
        assert (answer["error"], answer["prompt"], len(answer["tokens"])) == ("", len(good["ids"]), 8)
        assert answer["stored"] == len(good["ids"]) // BLOCK
    assert first["tokens"] == again["tokens"] == last["tokens"]
    whole_blocks = (len(good["ids"]) - 1) // BLOCK * BLOCK
    assert (first["cached"], again["cached"], last["cached"]) == (0, whole_blocks, whole_blocks)
    assert after_swap["cached"] == 0
    assert second_differs["cached"] <= good["spans"][1][0]
    for question, answer in zip(refused, rejected, strict=True):
        assert answer["error"], question["spans"]
        assert not answer["tokens"]


def test_vllm_with_pictures_and_videos_in_a_prompt_keeps_their_order_and_tells_the_kinds_of_a_file_apart(
    tmp_path: Path,
) -> None:
    prompts = Prompts(build_qwen2_vl(tmp_path / "model"), MediaKind.VIDEO)
    frames = [Image.new("RGB", (100, 80), color) for color in ("red", "blue", "green", "tan")]
    file = io.BytesIO()
    frames[0].save(file, "GIF", save_all=True, append_images=frames[1:], duration=500)
    gif = base64.b64encode(file.getvalue()).decode()
    clip = base64.b64encode(prompts.clip(1)).decode()
    picture, video = ("image", 12, prompts.id_of(QWEN_IMAGE_TOKEN)), ("video", 24, prompts.id_of(QWEN_VIDEO_TOKEN))
    clip_tokens = prompts.question(prompts.clip(1))["spans"][0][1]

    def question(*items: tuple[tuple[str, int, int], str]) -> dict[str, Any]:
        ids, spans = list(prompts.words), []
        for (_, length, token), _ in items:
            spans.append([len(ids), length, [token]])
            ids += [token] * length + prompts.words
        kinds, files = [kind for (kind, *_), _ in items], [data for _, data in items]
        return {"ids": ids + prompts.words * 12, "spans": spans, "kinds": kinds, "files": files, "max_tokens": 8}

    mixed = question((("video", clip_tokens, video[2]), clip), (picture, gif), (video, gif))
    asked = [mixed, mixed, question((video, gif)), question((picture, gif)), question((video, gif))]
    first, again, as_video, as_picture, last = served(prompts.folder, asked)["answers"]
    for answer in (first, again, as_video, as_picture, last):
        assert (answer["error"], len(answer["tokens"])) == ("", 8)
    assert first["tokens"] == again["tokens"]
    assert as_video["tokens"] == last["tokens"] != as_picture["tokens"]
    assert again["cached"] == (len(mixed["ids"]) - 1) // BLOCK * BLOCK
    assert last["cached"] == (len(asked[-1]["ids"]) - 1) // BLOCK * BLOCK
    assert as_picture["stored"] == len(asked[-2]["ids"]) // BLOCK
    # Of a file's second kind, other services cannot compute the identifier.
    assert as_video["stored"] < len(asked[2]["ids"]) // BLOCK


@pytest.mark.parametrize(
    ("kind", "missing", "kinds"),
    [
        (MediaKind.AUDIO, ["soundfile"], []),
        (MediaKind.AUDIO, ["torchaudio"], []),
        (MediaKind.AUDIO, [], ["audio"]),
        (MediaKind.VIDEO, ["cv2"], ["image"]),
        (MediaKind.VIDEO, ["soundfile"], ["image", "video"]),
    ],
)
def test_kind_whose_packages_are_missing_is_not_offered_and_the_reason_is_logged(
    kind: MediaKind, missing: list[str], kinds: list[str], tmp_path: Path
) -> None:
    folder = BUILDERS[kind](tmp_path / "model")
    found = inside("inside_media_prompts.py", {"model": str(folder), "chats": [], "missing": missing})
    assert found["kinds"] == kinds
    assert len(found["log"]) == int(kind.capability not in kinds)
    for line in found["log"]:
        assert f"takes {kind.capability}, which is not offered: install {missing[0]} " in line
