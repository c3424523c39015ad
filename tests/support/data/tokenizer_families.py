"""A tiny tokenizer.json, with a chat template, of every family that treats the edges of a text in its own way."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from tests.support.data.tiny_models import CHATML, CORPUS, build_tiny_model

LLAMA = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
INST = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content }}</s>"
    "{% else %}[INST] {{ m.content }} [/INST]{% endif %}{% endfor %}"
)
_CHATML_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_LLAMA_TOKENS = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
_INST_TOKENS = ("<s>", "</s>", "[INST]", "[/INST]")


def _bytes() -> list[str]:
    return [f"<0x{byte:02X}>" for byte in range(256)]


def chatml(folder: Path) -> Path:
    """Byte-level BPE as Qwen has it."""
    return build_tiny_model(folder)


def chatml_nfc(folder: Path) -> Path:
    """The same with a normalizer, and with an added token that takes the white space before it."""
    tokenizer = _byte_level(_CHATML_TOKENS)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_tokens([AddedToken("<tool>", lstrip=True, rstrip=True, normalized=False), AddedToken("grüße")])
    return _write(folder, tokenizer, CHATML, eos_token="<|im_end|>")


def llama(folder: Path) -> Path:
    """Byte-level BPE with a BOS before every text, as Llama 3 has it."""
    tokenizer = _byte_level(_LLAMA_TOKENS)
    bos = tokenizer.token_to_id("<|begin_of_text|>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|> $A", pair=None, special_tokens=[("<|begin_of_text|>", bos)]
    )
    return _write(folder, tokenizer, LLAMA, bos_token="<|begin_of_text|>", eos_token="<|eot_id|>")


def byte_fallback(folder: Path) -> Path:
    """A space before every piece, bytes for what has no token, as Llama 2 has it."""
    tokenizer = _sentencepiece_bpe()
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return _write(folder, tokenizer, INST, bos_token="<s>", eos_token="</s>")


def metaspace_first(folder: Path) -> Path:
    """A space before the first piece of a text only."""
    tokenizer = _sentencepiece_bpe()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return _write(folder, tokenizer, INST, bos_token="<s>", eos_token="</s>")


def unigram(folder: Path) -> Path:
    """Unigram with a space before every piece."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    trainer = trainers.UnigramTrainer(
        vocab_size=500, special_tokens=["<unk>", *_INST_TOKENS], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS * 4, trainer)
    content = json.loads(tokenizer.to_str())
    for entry in content["added_tokens"]:
        entry["normalized"] = False
    return _write(folder, Tokenizer.from_str(json.dumps(content)), INST, bos_token="<s>", eos_token="</s>")


EXACT: dict[str, Callable[[Path], Path]] = {
    make.__name__: make for make in (chatml, chatml_nfc, llama, byte_fallback, metaspace_first, unigram)
}


def _byte_level(special: tuple[str, ...]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=1024,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[AddedToken(text, special=True, normalized=False) for text in special],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 4, trainer)
    return tokenizer


def _sentencepiece_bpe() -> Tokenizer:
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator(
        CORPUS * 4,
        trainers.BpeTrainer(vocab_size=600, special_tokens=["<unk>", *_bytes()], show_progress=False),
    )
    model = json.loads(trained.to_str())["model"]
    merges = [(left, right) for left, right in model["merges"]]
    tokenizer = Tokenizer(models.BPE(model["vocab"], merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in _INST_TOKENS])
    return tokenizer


def _write(folder: Path, tokenizer: Tokenizer, template: str, **special: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template, **special}), "utf-8")
    return folder
