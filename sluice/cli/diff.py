"""`sluice diff-tokenizers`: shows where two tokenizers produce different prompts, side by side."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from services.common.base.errors import SluiceError
from services.common.packages.model_files import ModelSpec
from services.preprocess.contract.tokenizer import ChatRequest, TokenizerProtocol
from services.preprocess.contract.validation import parse_chat
from services.preprocess.limits import Limits
from services.preprocess.tokenizers.engine_extensions import EngineOptions
from services.preprocess.tokenizers.loading import load_tokenizer
from services.preprocess.tokenizers.probes import PROBES
from sluice.cli.errors import BadFlag

BEFORE, AFTER = 4, 8
SAME, DIFFERENT = 0, 1


@dataclass(frozen=True)
class Side:
    """Holds the result of one tokenizer for a chat: its ids, or the message of its error."""

    ids: tuple[int, ...] = ()
    refusal: str = ""

    def __str__(self) -> str:
        return f"refused: {self.refusal}" if self.refusal else f"{len(self.ids)} tokens"


def first_difference(left: Side, right: Side) -> int | None:
    """Returns the position of the first different id, or None; two rejections count as equal."""
    if left.refusal or right.refusal:
        return None if left.refusal and right.refusal else 0
    for position, (one, other) in enumerate(zip_longest(left.ids, right.ids)):
        if one != other:
            return position
    return None


def read_chats(path: Path) -> dict[str, ChatRequest]:
    """Reads chats: one JSON object per line, with messages and optionally tools and chat_template_kwargs."""
    found: dict[str, ChatRequest] = {}
    try:
        lines = path.read_text("utf-8").split("\n")  # not `splitlines`: U+2028 is valid inside a JSON string
    except (OSError, ValueError) as error:
        raise BadFlag(f"--chats {path} cannot be read: {error}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            body = dict(json.loads(line))
            parts = [json.dumps(body[key]).encode() if key in body else b"" for key in _PARTS]
            found[f"line {number}"] = parse_chat(*parts)
        except (ValueError, KeyError, TypeError) as error:
            raise BadFlag(f"{path}, line {number}, is not a chat: {error}.") from None
        except SluiceError as error:
            raise BadFlag(f"{path}, line {number}: {error.message}") from None
    if not found:
        raise BadFlag(f"--chats {path} contains no chat")
    return found


_PARTS = ("messages", "tools", "chat_template_kwargs")


def run(left: str, right: str, chats: Mapping[str, ChatRequest], engines: Mapping[str, EngineOptions]) -> int:
    """Compares and prints; returns exit code 0 if all prompts are the same, else 1.

    Raises:
        BadFlag: a side cannot be loaded.
    """
    console = Console(highlight=False)
    limits = Limits.default()
    try:
        with _loaded(left, limits, engines) as one, _loaded(right, limits, engines) as other:
            return _compare(console, (left, one), (right, other), chats)
    finally:
        limits.foreign_templates.close()


@contextmanager
def _loaded(text: str, limits: Limits, engines: Mapping[str, EngineOptions]) -> Iterator[TokenizerProtocol]:
    try:
        tokenizer = load_tokenizer(ModelSpec.parse(text), limits, engines)
    except ValueError as error:
        raise BadFlag(f"{error}.") from error
    except SluiceError as error:
        raise BadFlag(error.message) from error
    try:
        yield tokenizer
    finally:
        if (end := getattr(tokenizer, "close", None)) is not None:
            end()


def _compare(
    console: Console,
    left: tuple[str, TokenizerProtocol],
    right: tuple[str, TokenizerProtocol],
    chats: Mapping[str, ChatRequest],
) -> int:
    summary = Table("prompt", *(_heading(*side) for side in (left, right)), "", title="Prompts")
    details: list[Table] = []
    for name, chat in chats.items():
        one, other = _side(left[1], chat), _side(right[1], chat)
        position = first_difference(one, other)
        verdict = Text("same", "green") if position is None else Text(f"differ at {position}", "bold red")
        summary.add_row(name, str(one), str(other), verdict)
        if position is not None and not one.refusal and not other.refusal:
            details.append(_detail(name, position, (left[1], one), (right[1], other)))
    console.print(summary)
    for table in details:
        console.print(table)
    differing = [row for row in summary.columns[3].cells if str(row) != "same"]
    console.print(f"{len(differing)} of {len(chats)} prompts differ." if differing else "All prompts are the same.")
    return DIFFERENT if differing else SAME


def _heading(text: str, tokenizer: TokenizerProtocol) -> str:
    return f"{text}\n{tokenizer.facts.processor} {tokenizer.facts.fingerprint[:12]}"


def _side(tokenizer: TokenizerProtocol, chat: ChatRequest) -> Side:
    try:
        return Side(tuple(tokenizer.encode_chat(chat)))
    except SluiceError as error:
        return Side(refusal=error.message)


def _detail(
    name: str, position: int, left: tuple[TokenizerProtocol, Side], right: tuple[TokenizerProtocol, Side]
) -> Table:
    table = Table("at", "id", "text", "id", "text", title=f"{name}: the first difference")
    start = max(0, position - BEFORE)
    for at in range(start, min(position + AFTER, max(len(left[1].ids), len(right[1].ids)))):
        cells: list[Any] = []
        for tokenizer, side in (left, right):
            token = side.ids[at] if at < len(side.ids) else None
            cells += ("", "") if token is None else (str(token), Text(repr(tokenizer.decode([token]))))
        table.add_row(str(at), *cells, style="red" if cells[0] != cells[2] else "")
    return table


def default_chats() -> Mapping[str, ChatRequest]:
    """Returns the fixed set."""
    return PROBES
