"""Models: names, sources, and the location of tokenizer files."""

from __future__ import annotations

import hashlib
import importlib.resources
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.common.base.errors import ErrorKind, SluiceError, invalid

BUNDLED = "mistral-common:"
DEFAULT_SOURCE = f"{BUNDLED}tekken_240911"
DEFAULT_NAME = "tekken"
PROCESSORS = ("hf", "mistral")
ENGINE_PROCESSORS = ("vllm", "sglang")
"""Processors implemented by an engine; their files are in one of the formats of PROCESSORS."""

# Every file that affects token ids; weights are never downloaded for tokenizing.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
    "generation_config.json",
    "config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "tekken.json",
    "tokenizer.model",
    "tokenizer.model.v*",
)


@dataclass(frozen=True)
class ModelSpec:
    """A served model: its name, the source of its files, and the tokenizer implementation that reads them.

    `processor` is empty until detected from the files. `chat_template` is Jinja and replaces the one in the files; the
    parsers are what "auto" resolves to, empty to detect them from the template. `learned` marks a model discovered from
    a worker rather than configured by the operator.
    """

    name: str
    source: str
    processor: str = ""
    chat_template: str = ""
    tool_parser: str = ""
    reasoning_parser: str = ""
    learned: bool = False

    @classmethod
    def parse(cls, text: str) -> ModelSpec:
        """Parses `SOURCE`, `NAME=SOURCE` or `NAME=SOURCE@PROCESSOR`; raises ValueError when it is malformed.

        SOURCE is a folder, a hub id, or `mistral-common:NAME` for a tokenizer shipped with that package.
        """
        name, separator, source = text.partition("=")
        if not separator:
            name, source = "", text
        source, _, processor = source.partition("@")
        if not source:
            raise ValueError(f"model {text!r} has no source; write NAME=SOURCE")
        processors = (*PROCESSORS, *ENGINE_PROCESSORS)
        if processor and processor not in processors and ":" not in processor:
            raise ValueError(f"processor {processor!r} is unknown; choose from {', '.join(processors)}")
        return cls(name or default_name(source), source, processor)

    def __str__(self) -> str:
        return f"{self.name}={self.source}" + (f"@{self.processor}" if self.processor else "")


def default_name(source: str) -> str:
    """Returns the served name of a source: the folder name, the hub id, or `tekken` for the bundled default."""
    if source == DEFAULT_SOURCE:
        return DEFAULT_NAME
    if source.startswith(BUNDLED):
        return source.removeprefix(BUNDLED)
    return Path(source).resolve().name if Path(source).is_dir() else source


def resolve(source: str) -> Path:
    """Returns the local folder or tokenizer file of a source.

    May download from the hub, so call it off the event loop.

    Raises:
        SluiceError: NOT_FOUND with the source that does not exist.
    """
    if source.startswith(BUNDLED):
        return _bundled(source.removeprefix(BUNDLED))
    path = Path(os.path.expanduser(source))  # unlike Path.expanduser, does not raise for an unknown user
    if path.exists():
        return path.resolve()
    if source.startswith((".", "/", "~")):
        raise SluiceError(ErrorKind.NOT_FOUND, f"Model folder {source} does not exist.", param="model")
    return download(source, allow_patterns=TOKENIZER_FILES)


def is_hub_id(source: str) -> bool:
    """Whether a source is neither bundled nor a local path and so must come from the hub."""
    local = source.startswith((BUNDLED, ".", "/", "~")) or Path(source).exists()
    return not local


def _bundled(name: str) -> Path:
    folder = Path(str(importlib.resources.files("mistral_common"))) / "data"
    for path in (folder / name, folder / f"{name}.json"):
        if path.is_file():
            return path
    names = ", ".join(sorted(path.stem for path in folder.glob("tekken*.json")))
    raise SluiceError(
        ErrorKind.NOT_FOUND, f"mistral-common ships no tokenizer {name!r}; it has {names}.", param="model"
    )


def download(
    hub_id: str,
    allow_patterns: Sequence[str] | None = None,
    ignore_patterns: Sequence[str] | None = None,
    tqdm_class: type[Any] | None = None,
) -> Path:
    """Downloads the missing files of a hub id and returns their local folder.

    Raises:
        SluiceError: NOT_FOUND when the hub does not have it or is unreachable.
    """
    from huggingface_hub import snapshot_download

    allowed = None if allow_patterns is None else list(allow_patterns)
    ignored = None if ignore_patterns is None else list(ignore_patterns)
    try:
        return Path(snapshot_download(hub_id, allow_patterns=allowed, ignore_patterns=ignored, tqdm_class=tqdm_class))
    except Exception as error:  # the hub client raises many unrelated types
        raise SluiceError(
            ErrorKind.NOT_FOUND,
            f"Model {hub_id} is neither a local folder nor available from the hub ({type(error).__name__}).",
            param="model",
        ) from error


def detect_processor(path: Path) -> str:
    """Returns `mistral` or `hf` depending on the files; raises SluiceError(INVALID_ARGUMENT) when neither fits."""
    if path.is_file():
        return "hf" if path.name == "tokenizer.json" else "mistral"
    if (path / "tokenizer.json").is_file():
        return "hf"
    if (path / "tekken.json").is_file() or any(path.glob("tokenizer.model.v*")):
        return "mistral"
    raise invalid(f"{path} contains no tokenizer: add tokenizer.json or tekken.json.", param="model")


def tokenizer_files(path: Path) -> list[Path]:
    """Returns the files that affect token ids, sorted."""
    if path.is_file():
        return [path]
    return sorted({file for pattern in TOKENIZER_FILES for file in path.glob(pattern) if file.is_file()})


def file_name(path: Path, file: Path) -> str:
    """Returns the name of a tokenizer file, relative to the model folder."""
    return file.relative_to(path).as_posix() if path.is_dir() else file.name


def fingerprint(path: Path) -> str:
    """Returns the hex SHA-256 of the names and contents of the tokenizer's files."""
    digest = hashlib.sha256()
    for file in tokenizer_files(path):
        digest.update(f"{file_name(path, file)}\0{file.stat().st_size}\0".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()


def read_json(path: Path, name: str) -> dict[str, Any]:
    """Returns a JSON file of a model folder, or {} if absent; raises SluiceError(INVALID_ARGUMENT) if malformed."""
    file = path / name if path.is_dir() else path.parent / name
    if path.is_file() or not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise invalid(f"{name} of the model cannot be read: {error}.", param="model") from error
    if not isinstance(content, dict):
        raise invalid(f"{name} of the model is not a JSON object.", param="model")
    return content


THOUGHT_TAGS: tuple[tuple[str, str], ...] = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<|channel>thought", "<channel|>"),
    ("<seed:think>", "</seed:think>"),
    ("<mm:think>", "</mm:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
    ("Here is my thought process:", "Here is my response:"),
)
"""The opening and the closing tag of every family."""


def open_thought(text: str) -> str:
    """Returns the thought that a text leaves open, with its tag; empty for none.

    >>> open_thought("<think>a</think>b<think>c")
    '<think>c'
    """
    for opening, closing in THOUGHT_TAGS:
        start = text.rfind(opening)
        if start >= 0 and text.find(closing, start) < 0:
            return text[start:]
    return ""
