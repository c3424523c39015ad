"""Checks a tokenizer sent by a worker before this process loads it.

Loading and using a tokenizer runs native libraries on untrusted files. The checks bound what a small file can make
them do: the range of ids and the size of vocabularies, how much the pipeline can lengthen a text, and the length of
patterns. The files are parsed, loaded and used for the first time in a child process with resource limits; a tokenizer
that crashes it is rejected.
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

from services.common.base.errors import ErrorKind, SluiceError, invalid
from services.common.packages.model_files import detect_processor, tokenizer_files

CHECK_S = 120
MEMORY_BYTES = 768 << 20
MEMORY_FACTOR = 8
"""Memory for loading per byte of file, in addition to MEMORY_BYTES; the largest known tokenizers (12 MB) need 5."""

SMALL_BYTES = 8 << 20
"""Limit for each JSON file without a vocabulary, and for everything but the vocabulary in a file that has one."""
MAX_FIELDS = 16
"""Fields of a token in a worker's tokenizer; a tokenizer with more is refused."""
MAX_IDS = 1 << 20
"""Ids of a worker's tokenizer; a tokenizer with more is refused."""
MAX_ADDED = 1 << 17
"""Added tokens of a worker's tokenizer; a tokenizer with more is refused."""
MAX_TOKEN_CHARS = 1 << 16
"""Characters of a token of a worker's tokenizer; a tokenizer with a longer one is refused."""
MAX_PATTERN_CHARS = 1 << 14
"""Characters of a pattern of a worker's tokenizer; a tokenizer with a longer one is refused."""
MAX_STEPS = 64
"""Steps of each component of a worker's tokenizer; a tokenizer with more is refused."""
MAX_DEPTH = 8
"""Levels of steps within steps of a worker's tokenizer; a tokenizer with more is refused."""
MAX_GROWTH = 64
"""Factor by which all steps of a worker's tokenizer may lengthen a text; a tokenizer with more is refused."""
MAX_WORD_CHARS = 1_000
"""Characters of a word that a worker's tokenizer looks up; a tokenizer with more is refused."""
MAX_TEMPLATE_PIECES = 256
"""Pieces of the template of a worker's tokenizer; a tokenizer with more is refused."""
MAX_MAPPED_BYTES = 256
"""Bytes to which a worker's tokenizer maps a character; a tokenizer with more is refused."""
_SAMPLE = "The quick brown fox, 12345 Grüße 你好 😀\n\n"
_RUN_CHARS = 1 << 14


def check_tokenizer(path: Path) -> None:
    """Checks a tokenizer's files in a child process; takes about a second, so call it off the event loop.

    Raises:
        SluiceError: INVALID_ARGUMENT with the reason when it is rejected; UNAVAILABLE when the check could not run.
    """
    size = sum(file.stat().st_size for file in tokenizer_files(path))
    try:
        completed = subprocess.run(
            [sys.executable, "-m", __name__, str(path), str(MEMORY_BYTES + MEMORY_FACTOR * size)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={
                "PYTHONPATH": os.pathsep.join(folder or "." for folder in sys.path),
                "RAYON_NUM_THREADS": "1",  # each thread reserves address space, which RLIMIT_AS counts
                "TOKENIZERS_PARALLELISM": "false",
                "MALLOC_ARENA_MAX": "1",
                "OPENBLAS_NUM_THREADS": "1",
            },
            timeout=2 * CHECK_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise _refused("it takes too long to load") from None
    except OSError as error:
        raise SluiceError(
            ErrorKind.UNAVAILABLE, f"The worker's tokenizer could not be checked: {error.strerror}."
        ) from error
    if completed.returncode:
        raise _refused("it takes too much memory or time to load")
    if reason := completed.stdout.decode("utf-8", "replace").strip():
        raise _refused(reason[:300])


def _refused(reason: str) -> SluiceError:
    return invalid(f"The worker's tokenizer was rejected: {reason}.", code="bad_tokenizer")


_SMALL_FILES = (
    *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "generation_config.json"),
    "config.json",
)


class TokenizerRejected(Exception):
    """Raised with the reason why a tokenizer is rejected, phrased to follow "it was rejected:"."""


def look_at(path: Path) -> None:
    """Reads and loads a tokenizer; raises Refused with the reason when it must be rejected."""
    import orjson

    for file in tokenizer_files(path):
        if file.suffix == ".json":
            if file.name in _SMALL_FILES and file.stat().st_size > SMALL_BYTES:
                raise TokenizerRejected(f"{file.name} is larger than {SMALL_BYTES >> 20} MiB")
            try:
                content = orjson.loads(file.read_bytes())
            except orjson.JSONDecodeError as error:
                raise TokenizerRejected(f"{file.name} is not valid JSON") from error
            if not isinstance(content, dict):
                raise TokenizerRejected(f"{file.name} is not a JSON object")
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
    _check_rest(content, "model", "added_tokens")
    _check_rest(model, "vocab", "merges")
    _check_vocabulary(model.get("vocab"))
    _check_merges(model.get("merges"))
    _check_number(model.get("max_input_chars_per_word"), MAX_WORD_CHARS, "max_input_chars_per_word")
    for name in ("unk_token", "continuing_subword_prefix", "end_of_word_suffix"):
        _check_text(model.get(name), MAX_GROWTH, name)
    added = content.get("added_tokens") or []
    if not isinstance(added, list) or len(added) > MAX_ADDED:
        raise TokenizerRejected("it has too many added tokens")
    for entry in added:
        _check_fields(entry, "an added token")
        _check_id(entry.get("id"))
        _check_text(entry.get("content"), MAX_TOKEN_CHARS, "an added token")
    growth = 1
    for component in ("normalizer", "pre_tokenizer", "decoder", "post_processor"):
        for step in _steps(content.get(component), component):
            growth *= _growth(step)
            if growth > MAX_GROWTH:
                raise TokenizerRejected("its steps lengthen a text too much")


def _check_vocabulary(vocabulary: Any) -> None:
    """Checks a vocabulary: ids by token (BPE, WordPiece, WordLevel) or pairs of token and score (Unigram)."""
    if isinstance(vocabulary, dict):
        tokens: Iterator[Any] = iter(vocabulary)
        for number in vocabulary.values():
            _check_id(number)
    elif isinstance(vocabulary, list):
        tokens = (entry[0] if isinstance(entry, list) and entry else None for entry in vocabulary)
    else:
        raise TokenizerRejected("it has no vocabulary")
    if len(vocabulary) > MAX_IDS:
        raise TokenizerRejected("its vocabulary is too large")
    for token in tokens:
        _check_text(token, MAX_TOKEN_CHARS, "a token")


def _check_merges(merges: Any) -> None:
    """Checks that each merge is two strings, or both in one."""
    if not isinstance(merges, list | None):
        raise TokenizerRejected("its merges are not a list")
    for merge in merges or ():
        for text in merge if isinstance(merge, list) and len(merge) == 2 else (merge,):
            if not isinstance(text, str):
                raise TokenizerRejected("a merge is not a pair of strings")


def _check_rest(content: dict[str, Any], *large: str) -> None:
    """Checks that everything but the large parts is small: parsed, it may take many times its size."""
    import orjson

    rest = {name: value for name, value in content.items() if name not in large}
    if len(orjson.dumps(rest)) > SMALL_BYTES:
        raise TokenizerRejected("everything but its vocabulary is too large")


def _check_fields(entry: Any, subject: str) -> None:
    if len(_object(entry, subject)) > MAX_FIELDS or any(isinstance(value, list | dict) for value in entry.values()):
        raise TokenizerRejected(f"{subject} has unexpected fields")


def _check_id(number: Any) -> None:
    if not isinstance(number, int) or not 0 <= number < MAX_IDS:
        raise TokenizerRejected(f"an id is not an integer below {MAX_IDS:,}")


def _check_text(text: Any, most: int, subject: str) -> None:
    if text is not None and (not isinstance(text, str) or len(text) > most):
        raise TokenizerRejected(f"{subject} is not a string of at most {most:,} characters")


def _check_number(number: Any, most: int, subject: str) -> None:
    if number is not None and (not isinstance(number, int) or not 0 <= number <= most):
        raise TokenizerRejected(f"{subject} is not an integer from 0 to {most:,}")


def _object(value: Any, subject: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TokenizerRejected(f"{subject} is not an object")
    return value


def _steps(component: Any, name: str) -> list[dict[str, Any]]:
    """Returns the steps of one pipeline component as a flat list."""
    collected: list[dict[str, Any]] = []

    def walk(step: Any, depth: int) -> None:
        if depth > MAX_DEPTH or len(collected) > MAX_STEPS:
            raise TokenizerRejected(f"its {name} has too many steps")
        collected.append(_object(step, f"a step of the {name}"))
        for inner in ("normalizers", "pretokenizers", "decoders", "processors"):
            steps = step.get(inner)
            if steps is not None and not isinstance(steps, list):
                raise TokenizerRejected(f"its {name} is not a list of steps")
            for inner_step in steps or ():
                walk(inner_step, depth + 1)

    if component is not None:
        walk(component, 0)
    return collected


def _growth(step: dict[str, Any]) -> int:
    """Returns the largest factor by which a step can lengthen a text."""
    pattern = step.get("pattern")
    for written in pattern.values() if isinstance(pattern, dict) else (pattern,):
        _check_text(written, MAX_PATTERN_CHARS, "a pattern")
    for name in ("prepend", "replacement", "prefix", "suffix"):
        _check_text(step.get(name), MAX_GROWTH, name)
    for name in ("single", "pair", "special_tokens"):
        if len(step.get(name) or ()) > MAX_TEMPLATE_PIECES:
            raise TokenizerRejected("its template has too many pieces")
    _check_charsmap(step.get("precompiled_charsmap"))
    content = step.get("content")
    _check_text(content, MAX_GROWTH, "a replacement")
    return max(1, len(content or ""))


def _check_charsmap(charsmap: Any) -> None:
    """Checks a charsmap: the trie's size, the trie, then the NUL-terminated replacement strings."""
    if charsmap is None:
        return
    try:
        blob = base64.b64decode(charsmap, validate=True)
    except (TypeError, ValueError, binascii.Error) as error:
        raise TokenizerRejected("its precompiled_charsmap is not valid base64") from error
    texts = blob[4 + int.from_bytes(blob[:4], "little") :]
    if max(map(len, texts.split(b"\0")), default=0) > MAX_MAPPED_BYTES:
        raise TokenizerRejected("its precompiled_charsmap lengthens a text too much")


def look_at_tekken(content: dict[str, Any]) -> None:
    """Checks the content of a tekken.json."""
    _check_rest(content, "vocab", "special_tokens")
    config = _object(content.get("config") or {}, "config")
    _check_text(config.get("pattern"), MAX_PATTERN_CHARS, "the pattern")
    for name in ("num_vocab_tokens", "default_vocab_size", "default_num_special_tokens"):
        _check_number(config.get(name), MAX_IDS, name)
    for name in ("vocab", "special_tokens"):
        entries = content.get(name) or []
        if not isinstance(entries, list) or len(entries) > MAX_IDS:
            raise TokenizerRejected(f"its {name} is not a list of at most {MAX_IDS:,} entries")
        for entry in entries:
            _check_fields(entry, "a token")
            _check_number(entry.get("rank"), MAX_IDS, "a rank")
            _check_text(entry.get("token_bytes"), MAX_TOKEN_CHARS, "a token")
            _check_text(entry.get("token_str"), MAX_TOKEN_CHARS, "a token")


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
        if len(ids) > MAX_GROWTH * len(text) or len(tokenizer.decode(ids)) > MAX_GROWTH * len(text):
            raise TokenizerRejected("it lengthens a text too much")


def _try_mistral(path: Path) -> None:
    """Loads it with tiktoken, which mistral-common uses; SentencePiece files are only bounded in size."""
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
    """Runs in the child process: prints the reason for a rejection, or nothing when the tokenizer is accepted."""
    resource.setrlimit(resource.RLIMIT_AS, (int(arguments[1]),) * 2)
    resource.setrlimit(resource.RLIMIT_CPU, (CHECK_S, CHECK_S))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        look_at(Path(arguments[0]))
    except (TokenizerRejected, SluiceError) as error:
        print(str(error).rstrip("."), flush=True)
    except MemoryError:
        raise
    except BaseException as error:  # native loaders raise arbitrary types, including Rust panics
        print(f"loading it failed ({type(error).__name__})", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
