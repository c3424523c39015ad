"""Texts on which two tokenizer implementations are compared before the faster one is used."""

from __future__ import annotations

import random

_LINES = (
    "",
    " ",
    "a",
    "Hello, world!",
    "The quick brown fox jumps over the lazy dog while rain falls softly on old roofs.",
    "I'll say it's what they've done; we'd HAVE'LL don't DON'T",
    "  two leading, two trailing  ",
    "tabs\tand\t\ttabs \t mixed",
    "\n\n\n",
    "line\r\nline\r\n\r\nline\n  \n   x",
    "1 12 123 1234 12345 1234567890 3.14159 1e-10 0x7f",
    "def main() -> None:\n    for index in range(10):\n        print(index, 'hello world')\n",
    'if (a != b && c->d[0] >= 1) { return "x\\n"; } // ok',
    '{"name": "get_weather", "arguments": {"city": "Zürich", "days": [1, 2, 3]}}',
    "<div class=\"x\"><p>&amp; &lt;b&gt;</p></div>",
    "https://example.org/path?query=1&other=%20#part user@example.org",
    "Grüße aus München, ça va bien, naïve coöperation, Ærø, straße",
    "привет мир, Ωμέγα, שלום עולם, مرحبا بالعالم, नमस्ते दुनिया, สวัสดีชาวโลก",
    "你好世界。这是一个测试，包含标点符号！ こんにちは世界 カタカナ 안녕하세요",
    "😀🎉 👨‍👩‍👧‍👦 🇩🇪🇫🇷 👍🏽 ❤️",
    "e\u0301 vs \u00e9, \ufb01 ligature, \u1100\u1161 vs \uac00, \u212b vs \u00c5",
    "zero\u200bwidth\u200djoin \u00a0no-break \u2003em \u3000wide \u2028line \ufeffbom \u202ertl",
    "\x00\x01\x1f\x7f control \x85 next",
    "\U0001f9ff\U00020000\U0010ffff \ue000 private",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa" * 8,
    " " * 300 + "x" + "\n" * 300,
    "=" * 200 + "-" * 200 + "!?" * 100,
    "wordsWithoutSpacesButInCamelCase_and_snake_case-and-kebab-case.ext",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|></s><s>[INST]x[/INST]<|eot_id|> <unk> <pad>",
    "<|im_start|><|im_start|> <|im_end|>x<|im_end|",
)  # fmt: skip
_ALPHABET = (
    *"etaoin shrdlu ETAOIN 0123456789 .,;:!?'\"()[]{}<>|/\\@#$%^&*-_=+`~",
    *"\n\t\r  ",
    *"éüßñçøåÆ",
    *"ДяЖ ΩλΣ אבג عربي हिन्दी ไทย",
    *"你好世界，。 こカン 한글",
    *"😀🎉👍🏽\u200d❤️",
    *"\u0301\u0308\u00a0\u2009\u3000\u200b\ufeff\u2028",
    "'s",
    "'LL",
    "http://",
    "    ",
)


def _random_texts() -> tuple[str, ...]:
    # Seeded, so that every replica compares the same texts.
    chooser = random.Random(20240911)
    return tuple("".join(chooser.choices(_ALPHABET, k=chooser.randrange(1, 120))) for _ in range(300))


SAMPLES = (*_LINES, *_random_texts(), "\n".join(_LINES))
