"""Builds a model folder without weights that every peer can load: a byte-level BPE of 32,000 ids with a chat template.

Runs in the peers' own environment: python benchmarks/peer_model.py FOLDER
"""

from __future__ import annotations

import json
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config

VOCABULARY = 32_000
TRAINED_ON_BYTES = 20_000_000
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def sources() -> Iterator[str]:
    """Yields sources of the standard library, `TRAINED_ON_BYTES` in total."""
    seen = 0
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        text = path.read_text("utf-8", "ignore")
        yield text
        seen += len(text)
        if seen > TRAINED_ON_BYTES:
            return


def build(folder: Path) -> None:
    """Writes the tokenizer, the template and a configuration."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=False))
    split = pre_tokenizers.Split(Regex(SPLIT), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY - len(SPECIAL), initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(sources(), trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", model_max_length=131_072
    )
    # As in Qwen's models. SMG's own encoder declines the one that transformers adds.
    fast.backend_tokenizer.post_processor = processors.ByteLevel(
        add_prefix_space=False, trim_offsets=False, use_regex=False
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=131_072,
        eos_token_id=fast.eos_token_id,
        pad_token_id=fast.pad_token_id,
    )
    config.architectures = ["Qwen3ForCausalLM"]
    config.save_pretrained(folder)
    ids = {"eos_token_id": fast.eos_token_id, "pad_token_id": fast.pad_token_id}
    (folder / "generation_config.json").write_text(json.dumps(ids))


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.mkdir(parents=True, exist_ok=True)
    build(target)
