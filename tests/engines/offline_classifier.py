"""Makes tiny models that classify, and what transformers itself computes with them: JSON in, JSON out.

In: {"folder": where, "texts": [[first, second], [only], ...]}. Out: {"ids": [...], "scores": [...]} by model: "bert"
compares pairs of texts, "qwen3" has three classes.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForSequenceClassification,
)

CORPUS = ["a heron stands in the reeds while the river rises", "ducks swim under the bridge near the old mill"]


def tokenizer(folder: Path) -> int:
    """Writes a WordPiece tokenizer with BERT's special tokens, and returns its size."""
    words = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    words.normalizer = normalizers.BertNormalizer()
    words.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words.train_from_iterator(CORPUS, trainers.WordPieceTrainer(vocab_size=120, special_tokens=special))
    ids = [("[CLS]", words.token_to_id("[CLS]")), ("[SEP]", words.token_to_id("[SEP]"))]
    words.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ids
    )
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    PreTrainedTokenizerFast(tokenizer_object=words, **names).save_pretrained(folder)
    return int(words.get_vocab_size())


def make(folder: Path) -> None:
    """Writes both models, once."""
    if (folder / "qwen3" / "config.json").exists():
        return
    torch.manual_seed(5)
    sizes: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 96, "max_position_embeddings": 128, "initializer_range": 0.5}
    bert = BertConfig(vocab_size=tokenizer(folder / "bert"), num_labels=1, **sizes)
    BertForSequenceClassification(bert).save_pretrained(folder / "bert")
    qwen = Qwen3Config(
        vocab_size=tokenizer(folder / "qwen3"),
        num_labels=3,
        id2label={0: "good", 1: "bad", 2: "neither"},
        head_dim=32,
        num_key_value_heads=2,
        pad_token_id=0,
        **sizes,
    )
    Qwen3ForSequenceClassification(qwen).save_pretrained(folder / "qwen3")


@torch.no_grad()  # type: ignore[untyped-decorator]
def main() -> None:
    """Reads the question from standard input."""
    question = json.load(sys.stdin)
    folder = Path(question["folder"])
    make(folder)
    found = {}
    for name in ("bert", "qwen3"):
        model = AutoModelForSequenceClassification.from_pretrained(folder / name, dtype=torch.float32).eval()
        encode = AutoTokenizer.from_pretrained(folder / name)
        rows, scores = [], []
        for texts in question["texts"]:
            inputs = encode(*texts, return_tensors="pt", return_token_type_ids=True)
            if name == "qwen3":
                inputs.pop("token_type_ids", None)
            logits = model(**inputs).logits[0]
            scores.append((logits.sigmoid() if model.config.num_labels == 1 else logits.softmax(-1)).tolist())
            rows.append(inputs["input_ids"][0].tolist())
        found[name] = {"ids": rows, "scores": scores}
    print(json.dumps(found))


main()
