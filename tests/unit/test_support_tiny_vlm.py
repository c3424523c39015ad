"""The tiny models of the tests for images, audio and video: reproducible folders whose files agree with each other."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from services.preprocess.limits import Limits
from services.preprocess.protocol import ChatRequest
from services.preprocess.tokenizers.hf import HfTokenizer
from tests.support.data.tiny_audio import AUDIO_END, AUDIO_START, AUDIO_TOKEN, POSITIONS, build_qwen2_audio
from tests.support.data.tiny_vlm import (
    LLAVA_IMAGE_TOKEN,
    QWEN_IMAGE_TOKEN,
    QWEN_VIDEO_TOKEN,
    QWEN_VISION_END,
    QWEN_VISION_START,
    VisionFolders,
    build_llava,
    build_qwen2_vl,
    build_vision_models,
)

FILES = {
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "preprocessor_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
}
QWEN_IMAGE = QWEN_VISION_START + QWEN_IMAGE_TOKEN + QWEN_VISION_END


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> VisionFolders:
    return build_vision_models(tmp_path_factory.mktemp("vision"))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def read(path: Path) -> Any:
    return json.loads(path.read_text("utf-8"))


def shapes(folder: Path) -> Mapping[str, list[int]]:
    data = (folder / "model.safetensors").read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    header.pop("__metadata__")
    assert len(data) == 8 + size + max(tensor["data_offsets"][1] for tensor in header.values())
    return {name: tensor["shape"] for name, tensor in header.items()}


def test_folders_hold_processor_files_beside_weights_and_tokenizer(folders: VisionFolders) -> None:
    assert set(contents(folders.llava)) == FILES | {"processor_config.json"}
    assert set(contents(folders.qwen2_vl)) == FILES


@pytest.mark.parametrize("build", [build_llava, build_qwen2_audio, build_qwen2_vl])
def test_files_with_equal_seeds_are_equal_and_weights_with_another_seed_differ(build: Any, tmp_path: Path) -> None:
    first, second, other = (
        contents(build(tmp_path / name, seed=seed)) for name, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    assert first == second
    assert {name for name in first if first[name] != other[name]} == {"model.safetensors"}


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("llava", {"image_token_index": LLAVA_IMAGE_TOKEN}),
        (
            "qwen2_vl",
            {
                "image_token_id": QWEN_IMAGE_TOKEN,
                "vision_start_token_id": QWEN_VISION_START,
                "vision_end_token_id": QWEN_VISION_END,
                "video_token_id": QWEN_VIDEO_TOKEN,
            },
        ),
    ],
)
def test_ids_in_the_configuration_are_the_special_tokens_of_the_tokenizer(
    kind: str, names: Mapping[str, str], folders: VisionFolders
) -> None:
    folder: Path = getattr(folders, kind)
    config, tokenizer = read(folder / "config.json"), Tokenizer.from_file(str(folder / "tokenizer.json"))
    for field, token in names.items():
        assert config[field] == tokenizer.token_to_id(token), field
        assert tokenizer.encode(f"a{token}b").ids.count(config[field]) == 1
    assert tokenizer.token_to_id("<|im_end|>") in read(folder / "generation_config.json")["eos_token_id"]


@pytest.mark.parametrize("kind", ["llava", "qwen2_vl"])
def test_embeddings_and_output_layer_have_a_row_for_each_token(kind: str, folders: VisionFolders) -> None:
    folder: Path = getattr(folders, kind)
    size = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size()
    tensors = shapes(folder)
    assert [shape[0] for name, shape in tensors.items() if "embed_tokens" in name or "lm_head" in name] == [size, size]


def test_llava_vision_tower_has_a_position_for_each_patch_and_the_class_token(folders: VisionFolders) -> None:
    vision, tensors = read(folders.llava / "config.json")["vision_config"], shapes(folders.llava)
    patches = (vision["image_size"] // vision["patch_size"]) ** 2
    name = "vision_tower.vision_model.embeddings.position_embedding.weight"
    assert tensors[name] == [patches + 1, vision["hidden_size"]]


def test_qwen_mrope_sections_cover_half_of_a_head(folders: VisionFolders) -> None:
    config = read(folders.qwen2_vl / "config.json")
    head = config["hidden_size"] // config["num_attention_heads"]
    assert 2 * sum(config["rope_scaling"]["mrope_section"]) == head


@pytest.mark.parametrize(("kind", "image"), [("llava", LLAVA_IMAGE_TOKEN), ("qwen2_vl", QWEN_IMAGE)])
def test_template_places_images_in_order_in_messages_and_tool_results(
    kind: str, image: str, folders: VisionFolders
) -> None:
    tokenizer = HfTokenizer(getattr(folders, kind), Limits.default())
    picture, call = {"type": "image"}, {"name": "look", "arguments": {}}
    chat = ChatRequest(
        messages=[
            {
                "role": "user",
                "content": [{"type": "text", "text": "a"}, picture, {"type": "text", "text": "b"}, picture],
            },
            {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": call}]},
            {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "c"}, picture]},
        ],
        tools=[{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}],
    )
    text = tokenizer.render(chat)
    assert f"<|im_start|>user\na{image}b{image}<|im_end|>\n" in text
    assert f"<|im_start|>user\n<tool_response>\nc{image}\n</tool_response><|im_end|>\n<|im_start|>assistant\n" in text
    assert text.startswith("<|im_start|>system\n# Tools\n<tools>\n{")
    assert '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>' in text


def test_qwen_template_places_videos_and_images_in_order(folders: VisionFolders) -> None:
    parts = [{"type": "video"}, {"type": "text", "text": "a"}, {"type": "image"}, {"type": "video"}]
    text = HfTokenizer(folders.qwen2_vl, Limits.default()).render(ChatRequest([{"role": "user", "content": parts}]))
    video = QWEN_VISION_START + QWEN_VIDEO_TOKEN + QWEN_VISION_END
    assert f"<|im_start|>user\n{video}a{QWEN_IMAGE}{video}<|im_end|>\n" in text


def test_audio_template_numbers_the_clips_of_all_messages(tmp_path: Path) -> None:
    folder = build_qwen2_audio(tmp_path / "audio")
    clip = {"type": "audio"}
    chat: list[dict[str, Any]] = [
        {"role": "user", "content": [clip, {"type": "text", "text": "a"}]},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": [clip, clip]},
    ]
    text = HfTokenizer(folder, Limits.default()).render(ChatRequest(chat))
    first, second, third = (f"Audio {count}: {AUDIO_START}{AUDIO_TOKEN}{AUDIO_END}\n" for count in (1, 2, 3))
    assert f"<|im_start|>user\n{first}a<|im_end|>\n" in text
    assert f"<|im_start|>user\n{second}{third}<|im_end|>\n" in text


def test_audio_folder_has_ids_of_its_tokens_and_a_position_for_each_two_frames(tmp_path: Path) -> None:
    folder = build_qwen2_audio(tmp_path / "audio")
    config, tokenizer = read(folder / "config.json"), Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert config["audio_token_index"] == tokenizer.token_to_id(AUDIO_TOKEN)
    assert None not in (tokenizer.token_to_id(AUDIO_START), tokenizer.token_to_id(AUDIO_END))
    assert set(contents(folder)) == FILES | {"chat_template.jinja"}
    tensors, audio = shapes(folder), config["audio_config"]
    assert tensors["audio_tower.embed_positions.weight"] == [POSITIONS, audio["d_model"]]
    extractor = read(folder / "preprocessor_config.json")
    frames = extractor["chunk_length"] * extractor["sampling_rate"] // extractor["hop_length"]
    assert (frames, extractor["feature_size"]) == (2 * POSITIONS, audio["num_mel_bins"])
