"""Which tokens stand for audio and videos; the figures are those of vLLM 0.32 and transformers 5.19."""

from __future__ import annotations

import pytest

from services.common.types.media.facts import AudioFacts, VideoFacts
from services.common.types.media.spans import MediaKind
from services.preprocess.media.rules import AudioWindow, ModelFiles, SampledFrames, media_rules, sampled_frames

WINDOW = AudioWindow(9, 16_000, 160, 480_000)
AUDIO_MODEL = ModelFiles({"audio_token_index": 9}, {"processor_class": "Qwen2AudioProcessor"})
VIDEO_MODEL = ModelFiles(
    {"image_token_id": 8, "video_token_id": 9}, {"processor_class": "Qwen2VLProcessor", "max_pixels": 1_003_520}
)


@pytest.mark.parametrize(
    ("samples", "rate", "tokens"),
    [
        (321, 16_000, 1),
        (16_000, 16_000, 25),
        (480_000, 16_000, 750),
        (9_000_000, 16_000, 750),
        (44_100, 44_100, 25),
        (8_000, 8_000, 25),
        (48_000 * 3, 48_000, 75),
    ],
)
def test_audio_window_counts_tokens_at_the_rate_of_the_model(samples: int, rate: int, tokens: int) -> None:
    assert WINDOW.ids_of(AudioFacts(samples, rate, "WAV")).tolist() == [9] * tokens


@pytest.mark.parametrize("samples", [1, 160, 320])
def test_audio_window_of_a_clip_without_a_token_raises(samples: int) -> None:
    with pytest.raises(ValueError, match="too short"):
        WINDOW.ids_of(AudioFacts(samples, 16_000, "WAV"))


@pytest.mark.parametrize(
    ("frames", "rate", "sampled"),
    [(2, 10, 2), (3, 10, 2), (10, 10, 4), (17, 2.4, 15), (30, 2.3, 27), (34, 4.8, 15), (300, 30, 20), (9_000, 4, 768)],
)
def test_sampled_frames_are_two_a_second_within_bounds(frames: int, rate: float, sampled: int) -> None:
    assert sampled_frames(frames, rate) == sampled


def test_sampled_frames_of_a_video_share_tokens_in_pairs() -> None:
    rule = SampledFrames(9, 28, 56 * 56, 28 * 28 * 16, 2)
    assert len(rule.ids_of(VideoFacts(112, 56, 10, 10, "MP4"))) == 2 * 8
    assert len(rule.ids_of(VideoFacts(112, 56, 17, 2.4, "MP4"))) == 8 * 8
    assert len(rule.ids_of(VideoFacts(1000, 1000, 10, 10, "MP4"))) == 2 * 16


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        (VideoFacts(64, 64, 1, 10, "MP4"), "single frame"),
        (VideoFacts(2010, 10, 4, 10, "MP4"), "ratio"),
        (VideoFacts(4000, 2000, 100_000, 10, "MP4"), "more than 1,048,576 tokens"),
    ],
)
def test_sampled_frames_of_a_refused_video_raises(facts: VideoFacts, reason: str) -> None:
    rule = SampledFrames(9, 28, 56 * 56, 28 * 28 * 16_384, 2)
    with pytest.raises(ValueError, match=reason):
        rule.ids_of(facts)


def test_media_rules_of_qwen2_audio_have_audio_only() -> None:
    assert media_rules(AUDIO_MODEL) == {MediaKind.AUDIO: WINDOW}


def test_media_rules_of_qwen2_vl_have_images_and_videos() -> None:
    rules = media_rules(VIDEO_MODEL)
    assert list(rules) == [MediaKind.IMAGE, MediaKind.VIDEO]
    assert rules[MediaKind.VIDEO] == SampledFrames(9, 28, 28 * 28 * 128, 1_003_520, 2)


@pytest.mark.parametrize(
    ("processor", "video", "bounds"),
    [
        ({"video_processor": {"min_pixels": 784, "max_pixels": 7_840}}, {"max_pixels": 99_999}, (28, 784, 7_840)),
        ({}, {"size": {"shortest_edge": 784, "longest_edge": 7_840}}, (28, 784, 7_840)),
        ({}, {}, (28, 28 * 28 * 128, 1_003_520)),
    ],
)
def test_media_rules_of_qwen2_vl_read_the_bounds_of_videos_first_from_their_own_files(
    processor: dict[str, object], video: dict[str, object], bounds: tuple[int, int, int]
) -> None:
    rule = media_rules(VIDEO_MODEL._replace(processor=processor, video=video))[MediaKind.VIDEO]
    assert isinstance(rule, SampledFrames)
    assert (rule.side, rule.least, rule.most) == bounds


@pytest.mark.parametrize(
    "files",
    [
        AUDIO_MODEL._replace(config={}),
        AUDIO_MODEL._replace(preprocessor={"processor_class": "Qwen2AudioProcessor", "hop_length": 0}),
        AUDIO_MODEL._replace(preprocessor={"processor_class": "OtherProcessor"}),
        VIDEO_MODEL._replace(config={}),
        VIDEO_MODEL._replace(preprocessor={"processor_class": "Qwen2VLProcessor", "max_pixels": 1 << 50}),
    ],
)
def test_media_rules_of_other_files_are_none(files: ModelFiles) -> None:
    assert media_rules(files) == {}
