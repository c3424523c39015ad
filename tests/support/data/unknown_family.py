"""A model with images whose family preprocess has no rule of."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.data.tiny_models import build_tiny_model

PLACEHOLDER = "<pic>"
PLACEHOLDER_ID = 40_000
TEMPLATE = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{{ '<pic>' if p.type == 'image' else p.text }}{% endfor %}{% endif %}{% endfor %}"
)


def build_unknown_family(folder: Path) -> Path:
    """Writes the model's files, without weights of images; returns the folder."""
    model = build_tiny_model(folder)
    file = model / "tokenizer.json"
    content = json.loads(file.read_text())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    content["added_tokens"].append({"id": PLACEHOLDER_ID, "content": PLACEHOLDER, "special": True, **flags})
    content["model"]["vocab"][PLACEHOLDER] = PLACEHOLDER_ID
    file.write_text(json.dumps(content))
    (model / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": "AbacusImageProcessor"}))
    (model / "chat_template.jinja").write_text(TEMPLATE)
    return model
