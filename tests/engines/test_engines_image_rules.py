"""The tokens of images are those of the model's own processor in transformers, which preprocess does without."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from random import Random
from typing import Any

import pytest

from services.common.base.packing import unpack_u32
from services.common.types.media.facts import ImageFacts
from services.common.types.media.spans import MediaKind
from services.preprocess.contract.tokenizer import ChatRequest, ImageRule
from services.preprocess.media.expansion import CountedItem, expand
from services.preprocess.tokenizers.hf import HfTokenizer
from tests.engines.engine_suite import interpreter
from tests.support.data.loaded_tokenizers import limits
from tests.support.data.tiny_vlm import build_llava, build_qwen2_vl

pytestmark = pytest.mark.engines

BUILDERS = {"llava": build_llava, "qwen2-vl": build_qwen2_vl}
PROMPTS = 200
SIZES = 3_000
WORDS = ("a", "Grüße", "\n\n", "  spaces ", "你好", "<b>", "What is it?", "😀", "0123", "<|im_end|>")
# Other bounds than those of the tiny model: those of the real one, and those of Qwen2.5-VL's files in the other form.
BOUNDS: dict[str, dict[str, Any]] = {
    "tiny": {},
    "real": {"min_pixels": 3136, "max_pixels": 12_845_056},
    "other form": {"min_pixels": None, "max_pixels": None, "size": {"shortest_edge": 50_000, "longest_edge": 900_000}},
}


def sizes(random: Random) -> list[tuple[int, int]]:
    edges = [1, 2, 13, 14, 15, 27, 28, 29, 41, 42, 43, 56, 70, 200, 201, 1023, 1024, 5600]
    found = [(width, height) for width in edges for height in edges]
    return found + [(random.randint(1, 4000), random.randint(1, 4000)) for _ in range(SIZES - len(found))]


def prompt(random: Random) -> dict[str, Any]:
    """Returns a conversation with 1 to 4 images, also in a tool result."""
    images = random.randint(1, 4)
    parts: list[dict[str, Any]] = [{"type": "image"}] * images
    parts += [{"type": "text", "text": random.choice(WORDS)} for _ in range(random.randint(0, 5))]
    random.shuffle(parts)
    messages: list[dict[str, Any]] = [{"role": "user", "content": parts}]
    if random.random() < 0.5:
        cut = random.randint(0, len(parts))
        messages = [
            {"role": "user", "content": parts[:cut] or "Go on."},
            {"role": "assistant", "content": random.choice(WORDS)},
            {"role": random.choice(["user", "tool"]), "content": parts[cut:] or "And now?"},
        ]
    return {
        "messages": messages,
        "sizes": [(random.randint(20, 300), random.randint(20, 300)) for _ in range(images)],
    }


def numbered(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the messages with references to their images."""
    count = 0
    found = []
    for message in messages:
        content = message["content"]
        if isinstance(content, list):
            parts = []
            for part in content:
                parts.append({**part, "media": count} if part["type"] == "image" else part)
                count += part["type"] == "image"
            message = {**message, "content": parts}
        found.append(message)
    return found


def items(found: list[tuple[int, int]]) -> list[CountedItem]:
    return [CountedItem("messages[0].content[0]", bytes(16), ImageFacts(*size, "PNG")) for size in found]


@pytest.mark.parametrize(("kind", "bounds"), [("llava", "tiny"), *(("qwen2-vl", bounds) for bounds in BOUNDS)])
def test_image_rule_ids_equal_those_of_the_models_processor(kind: str, bounds: str, tmp_path: Path) -> None:
    random = Random(18)
    folder = BUILDERS[kind](tmp_path / kind)
    config = folder / "preprocessor_config.json"
    changed = {**json.loads(config.read_text()), **BOUNDS[bounds]}
    config.write_text(json.dumps({name: value for name, value in changed.items() if value is not None}))
    request: dict[str, Any] = {"sizes": sizes(random), "prompts": [prompt(random) for _ in range(PROMPTS)]}
    theirs = by_processor(folder, request)
    tokenizer = HfTokenizer(folder, limits())
    rule = tokenizer.media_rules[MediaKind.IMAGE]
    assert isinstance(rule, ImageRule)
    for (width, height), count in zip(request["sizes"], theirs["counts"], strict=True):
        if count is None:
            with pytest.raises(ValueError, match="ratio"):
                rule.ids_of(ImageFacts(width, height, "PNG"))
        else:
            assert len(rule.ids_of(ImageFacts(width, height, "PNG"))) == count, (width, height)
    for each, ids in zip(request["prompts"], theirs["ids"], strict=True):
        packed = tokenizer.pack_chat(ChatRequest(numbered(each["messages"])))
        expanded, _ = expand(packed, {MediaKind.IMAGE: rule}, items(each["sizes"]))
        assert unpack_u32(expanded).tolist() == ids, each


def by_processor(folder: Path, request: dict[str, Any]) -> dict[str, Any]:
    """Returns what the model's own processor makes of sizes and prompts, see `offline_image_ids.py`."""
    done = subprocess.run(
        [interpreter("transformers"), str(Path(__file__).with_name("offline_image_ids.py")), str(folder)],
        input=json.dumps(request),
        env={"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
