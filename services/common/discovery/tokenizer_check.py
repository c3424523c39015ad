"""Looks at a tokenizer that a worker sent, before this process loads it.

Loading and using a tokenizer runs native libraries on whatever its files say. What they can be made to do with a small
file is bounded here by its content: ids and vocabularies of a size that a table can have, steps that do not multiply
the text they are given, patterns of a length that can be compiled. That is read, and the tokenizer loaded and used for
the first time, in a process with limits of its own; one that ends it is refused.
"""

from __future__ import annotations

import base64
import binascii
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from services.common.errors import ErrorKind, SluiceError, invalid
from services.common.models import detect_processor, tokenizer_files

CHECK_S = 120
MEMORY_BYTES = 768 << 20
MEMORY_FACTOR = 8
"""Times the size of the files that loading them may take beside MEMORY_BYTES; the largest known take 12 and need 5."""

SMALL_BYTES = 8 << 20
"""Of every JSON file beside the vocabulary, and of all that a vocabulary's file holds beside it."""
MOST_FIELDS = 16
MOST_IDS = 1 << 20
MOST_ADDED = 1 << 17
MOST_TOKEN_CHARS = 1 << 16
MOST_PATTERN_CHARS = 1 << 14
MOST_STEPS = 64
MOST_DEPTH = 8
MOST_GROWTH = 64
"""Times that the steps of a pipeline together may make a text longer."""
MOST_WORD_CHARS = 1_000
MOST_TEMPLATE_PIECES = 256
MOST_MAPPED_BYTES = 256
_SAMPLE = "The quick brown fox, 12345 Grüße 你好 😀\n\n"
_RUN_CHARS = 1 << 14


def check_tokenizer(path: Path) -> None:
    """Looks at a tokenizer's files, in a process of its own; takes a second, so call it off the event loop.

    Raises:
        SluiceError: INVALID_ARGUMENT with what is wrong with it; UNAVAILABLE when it cannot be looked at now.
    """
    size = sum(file.stat().st_size for file in tokenizer_files(path))
    try:
        done = subprocess.run(
            [sys.executable, "-m", __name__, str(path), str(MEMORY_BYTES + MEMORY_FACTOR * size)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={
                "PYTHONPATH": os.pathsep.join(folder or "." for folder in sys.path),
                "RAYON_NUM_THREADS": "1",  # threads reserve address space, which is what is bounded
                "TOKENIZERS_PARALLELISM": "false",
                "MALLOC_ARENA_MAX": "1",
                "OPENBLAS_NUM_THREADS": "1",
            },
            timeout=2 * CHECK_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise _refused("it takes too long to be loaded") from None
    except OSError as error:
        raise SluiceError(
            ErrorKind.UNAVAILABLE, f"The worker's tokenizer cannot be looked at now: {error.strerror}."
        ) from error
    if done.returncode:
        raise _refused("it takes too much memory or time to be loaded")
    if reason := done.stdout.decode("utf-8", "replace").strip():
        raise _refused(reason[:300])


def _refused(reason: str) -> SluiceError:
    return invalid(f"The worker's tokenizer is refused: {reason}.", code="bad_tokenizer")


_SMALL_FILES = (
    *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "generation_config.json"),
    "config.json",
)


class Refused(Exception):
    """What is wrong with a tokenizer, in words that follow "it is refused:"."""


def look_at(path: Path) -> None:
    """Reads and loads a tokenizer; Refused says what is wrong with it."""
    import orjson

    for file in tokenizer_files(path):
        if file.suffix == ".json":
            if file.name in _SMALL_FILES and file.stat().st_size > SMALL_BYTES:
                raise Refused(f"{file.name} is larger than {SMALL_BYTES >> 20} MiB")
            try:
                content = orjson.loads(file.read_bytes())
            except orjson.JSONDecodeError as error:
                raise Refused(f"{file.name} is not valid JSON") from error
            if not isinstance(content, dict):
                raise Refused(f"{file.name} is not a JSON object")
            if file.name == "tokenizer.json":
                look_at_pipeline(content)
            elif "vocab" in content:
                look_at_tekken(content)
    if detect_processor(path) == "hf":
        _try_hf(path)
    else:
        _try_mistral(path)


def look_at_pipeline(content: dict[str, Any]) -> None:
    """Checks the content of a tokenizer.json."""
    model = _object(content.get("model"), "the model")
    _look_at_rest(content, "model", "added_tokens")
    _look_at_rest(model, "vocab", "merges")
    _look_at_vocabulary(model.get("vocab"))
    _look_at_merges(model.get("merges"))
    _look_at_number(model.get("max_input_chars_per_word"), MOST_WORD_CHARS, "max_input_chars_per_word")
    for name in ("unk_token", "continuing_subword_prefix", "end_of_word_suffix"):
        _look_at_text(model.get(name), MOST_GROWTH, name)
    added = content.get("added_tokens") or []
    if not isinstance(added, list) or len(added) > MOST_ADDED:
        raise Refused("it has too many added tokens")
    for entry in added:
        _look_at_fields(entry, "an added token")
        _look_at_id(entry.get("id"))
        _look_at_text(entry.get("content"), MOST_TOKEN_CHARS, "an added token")
    growth = 1
    for part in ("normalizer", "pre_tokenizer", "decoder", "post_processor"):
        for step in _steps(content.get(part), part):
            growth *= _growth(step)
            if growth > MOST_GROWTH:
                raise Refused("its steps make a text too much longer")


def _look_at_vocabulary(vocabulary: Any) -> None:
    """A token's id by its text (BPE, WordPiece, WordLevel) or a list of tokens and scores (Unigram)."""
    if isinstance(vocabulary, dict):
        tokens: Iterator[Any] = iter(vocabulary)
        for number in vocabulary.values():
            _look_at_id(number)
    elif isinstance(vocabulary, list):
        tokens = (entry[0] if isinstance(entry, list) and entry else None for entry in vocabulary)
    else:
        raise Refused("it has no vocabulary")
    if len(vocabulary) > MOST_IDS:
        raise Refused("its vocabulary is too large")
    for token in tokens:
        _look_at_text(token, MOST_TOKEN_CHARS, "a token")


def _look_at_merges(merges: Any) -> None:
    """Two texts each, or both in one."""
    if not isinstance(merges, list | None):
        raise Refused("its merges are not a list")
    for merge in merges or ():
        for text in merge if isinstance(merge, list) and len(merge) == 2 else (merge,):
            if not isinstance(text, str):
                raise Refused("a merge is not of two texts")


def _look_at_rest(content: dict[str, Any], *large: str) -> None:
    """What is beside the large parts of a file must be small: in memory it may take many times its size."""
    import orjson

    rest = {name: value for name, value in content.items() if name not in large}
    if len(orjson.dumps(rest)) > SMALL_BYTES:
        raise Refused("it holds too much beside its vocabulary")


def _look_at_fields(entry: Any, what: str) -> None:
    if len(_object(entry, what)) > MOST_FIELDS or any(isinstance(value, list | dict) for value in entry.values()):
        raise Refused(f"{what} has fields that it should not have")


def _look_at_id(number: Any) -> None:
    if not isinstance(number, int) or not 0 <= number < MOST_IDS:
        raise Refused(f"an id is not a number below {MOST_IDS:,}")


def _look_at_text(text: Any, most: int, what: str) -> None:
    if text is not None and (not isinstance(text, str) or len(text) > most):
        raise Refused(f"{what} is not a text of at most {most:,} characters")


def _look_at_number(number: Any, most: int, what: str) -> None:
    if number is not None and (not isinstance(number, int) or not 0 <= number <= most):
        raise Refused(f"{what} is not a number of at most {most:,}")


def _object(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise Refused(f"{what} is not an object")
    return value


def _steps(part: Any, name: str) -> list[dict[str, Any]]:
    """The steps of a part of the pipeline in one list."""
    found: list[dict[str, Any]] = []

    def walk(step: Any, depth: int) -> None:
        if depth > MOST_DEPTH or len(found) > MOST_STEPS:
            raise Refused(f"its {name} has too many steps")
        found.append(_object(step, f"a step of the {name}"))
        for inner in ("normalizers", "pretokenizers", "decoders", "processors"):
            steps = step.get(inner)
            if steps is not None and not isinstance(steps, list):
                raise Refused(f"its {name} is not a list of steps")
            for one in steps or ():
                walk(one, depth + 1)

    if part is not None:
        walk(part, 0)
    return found


def _growth(step: dict[str, Any]) -> int:
    """How many times longer a step can make a text."""
    pattern = step.get("pattern")
    for written in pattern.values() if isinstance(pattern, dict) else (pattern,):
        _look_at_text(written, MOST_PATTERN_CHARS, "a pattern")
    for name in ("prepend", "replacement", "prefix", "suffix"):
        _look_at_text(step.get(name), MOST_GROWTH, name)
    for name in ("single", "pair", "special_tokens"):
        if len(step.get(name) or ()) > MOST_TEMPLATE_PIECES:
            raise Refused("its template has too many pieces")
    _look_at_charsmap(step.get("precompiled_charsmap"))
    content = step.get("content")
    _look_at_text(content, MOST_GROWTH, "a replacement")
    return max(1, len(content or ""))


def _look_at_charsmap(charsmap: Any) -> None:
    """A trie after its size, then the texts that it maps to, each with a zero after it."""
    if charsmap is None:
        return
    try:
        blob = base64.b64decode(charsmap, validate=True)
    except (TypeError, ValueError, binascii.Error) as error:
        raise Refused("its map of characters cannot be read") from error
    texts = blob[4 + int.from_bytes(blob[:4], "little") :]
    if max(map(len, texts.split(b"\0")), default=0) > MOST_MAPPED_BYTES:
        raise Refused("its map of characters makes a text too much longer")


def look_at_tekken(content: dict[str, Any]) -> None:
    """Checks the content of a tekken.json."""
    _look_at_rest(content, "vocab", "special_tokens")
    config = _object(content.get("config") or {}, "config")
    _look_at_text(config.get("pattern"), MOST_PATTERN_CHARS, "the pattern")
    for name in ("num_vocab_tokens", "default_vocab_size", "default_num_special_tokens"):
        _look_at_number(config.get(name), MOST_IDS, name)
    for name in ("vocab", "special_tokens"):
        entries = content.get(name) or []
        if not isinstance(entries, list) or len(entries) > MOST_IDS:
            raise Refused(f"its {name} is not a list of at most {MOST_IDS:,}")
        for entry in entries:
            _look_at_fields(entry, "a token")
            _look_at_number(entry.get("rank"), MOST_IDS, "a rank")
            _look_at_text(entry.get("token_bytes"), MOST_TOKEN_CHARS, "a token")
            _look_at_text(entry.get("token_str"), MOST_TOKEN_CHARS, "a token")


def _samples() -> Iterator[str]:
    yield _SAMPLE
    for char in ("a", " ", "\n", "."):
        yield char * _RUN_CHARS


def _try_hf(path: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path if path.is_file() else path / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    for text in _samples():
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        if len(ids) > MOST_GROWTH * len(text) or len(tokenizer.decode(ids)) > MOST_GROWTH * len(text):
            raise Refused("it makes a text too much longer")


def _try_mistral(path: Path) -> None:
    """With the library that mistral-common uses for this; SentencePiece's own format is only bounded in its size."""
    file = path if path.is_file() else path / "tekken.json"
    if file.suffix != ".json" or not file.is_file():
        return
    import orjson
    import tiktoken

    content = orjson.loads(file.read_bytes())
    ranks = {base64.b64decode(entry["token_bytes"]): entry["rank"] for entry in content["vocab"]}
    tekken = tiktoken.Encoding(
        path.name, pat_str=content["config"]["pattern"], mergeable_ranks=ranks, special_tokens={}
    )
    for text in _samples():
        tekken.decode(tekken.encode_ordinary(text))


def main(arguments: list[str]) -> None:
    """The process: writes what is wrong to standard output, nothing where all is well."""
    resource.setrlimit(resource.RLIMIT_AS, (int(arguments[1]),) * 2)
    resource.setrlimit(resource.RLIMIT_CPU, (CHECK_S, CHECK_S))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        look_at(Path(arguments[0]))
    except (Refused, SluiceError) as error:
        print(str(error).rstrip("."), flush=True)
    except MemoryError:
        raise
    except BaseException as error:  # native loaders raise whatever they like, panics included
        print(f"it cannot be loaded ({type(error).__name__})", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
