"""The commands of the pages, in their order: what a newcomer copies into a shell, and the files that a page gives.

A block is fenced (``sh``, ``bash``, ``console``, ``python``), or indented with a line that is a command. One that
cannot run where the tests run is marked by a comment above it, ``<!-- walk: REASON -->``. A fenced block below a line
that is nothing but a path in backticks and a colon is that file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).parents[2]
LANGUAGES = {"sh": "shell", "bash": "shell", "console": "console", "python": "python"}
REASONS = {
    "gpu": r"\b(vllm|sglang)\b",
    "cluster": r"\bkubectl\b",
    "registry": r"\bpip3? install\b|(vllm|sglang)",
    "docker": r"\bdocker\b|\broll\.sh\b",
    "long": r"\bmake (test|bench|certificate)|\bsluice conformance\b|\bbenchmarks/",
    "fragment": r"",
}
"""Why a block is not run, and what such a block must contain: a mark is no way around a command that fails."""

_PROGRAMS = (
    "sluice|python3?|pip3?|curl|grpcurl|docker|kubectl|make|export|for|git|openssl|cd|vllm|umask|redis-cli|promtool|apt-get|"
    r"scripts/\S+|deploy/\S+"
)
_HAS_COMMAND = re.compile(rf"^(?:\$ |[A-Z][A-Z0-9_]*=\$\(|[A-Z][A-Z0-9_]*=\S+ )*(?:{_PROGRAMS})(?:\s|$)", re.MULTILINE)
_FENCE = re.compile(r"^(?P<indent> *)```(?P<language>[\w-]*)[^\n]*$")
_MARK = re.compile(r"^\s*<!-- walk: (?P<reason>.*?) -->\s*$")
_FILE = re.compile(r"^`(?P<path>[\w./-]+)`:$")
_CODE_INDENT = 4

Kind = Literal["shell", "console", "python", "file"]


class BadPage(Exception):
    """A page marks something wrongly; the text says where and what to change."""


@dataclass(frozen=True)
class Block:
    """A piece of a page.

    Attributes:
        page: path from the root of the repository.
        line: where its text begins, counted from 1.
        text: without its indent.
        reason: why it is not run; empty when it is.
        path: of a block that is a file.
    """

    page: str
    line: int
    kind: Kind
    text: str
    reason: str = ""
    path: str = ""

    @property
    def place(self) -> str:
        """Where it is, as editors understand it."""
        return f"{self.page}:{self.line}"


def pages() -> list[str]:
    """The README and every page of docs."""
    return ["README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))]


def blocks_of(page: str) -> list[Block]:
    """The blocks of one page; BadPage as `blocks_in`."""
    return blocks_in(page, (ROOT / page).read_text("utf-8"))


def blocks_in(page: str, text: str) -> list[Block]:
    """The blocks of a text.

    Raises:
        BadPage: a mark that has no block, gives an unknown reason, or one that the block does not show.
    """
    found: list[Block] = []
    mark: tuple[int, str] | None = None
    above = ""
    for number, lines in _pieces(text.splitlines()):
        first = lines[0]
        if marked := _MARK.match(first):
            _no_block(page, mark)
            mark = (number, marked["reason"])
            continue
        block = _block(page, number, lines, above)
        above = first if len(lines) == 1 else ""
        if block is None:
            _no_block(page, mark)
            mark = None
        else:
            found.append(_marked(block, mark[1]) if mark is not None else block)
            mark = None
    _no_block(page, mark)
    return found


def commands_of(block: Block) -> list[str]:
    """The commands of a block of a shell, each with the lines that belong to it; of a console without its output."""
    if block.kind == "console":
        return _of_console(block.text)
    commands: list[str] = []
    part: list[str] = []
    for line in block.text.splitlines():
        if not part and not line.strip():
            continue
        part.append(line)
        text = "\n".join(part)
        if not line.endswith("\\") and _is_complete(text):
            commands.append(text)
            part = []
    return [*commands, "\n".join(part)] if part else commands


def _of_console(text: str) -> list[str]:
    commands: list[str] = []
    continues = False
    for line in text.splitlines():
        if line.startswith("$ "):
            commands.append(line[2:])
        elif continues:
            commands[-1] += "\n" + line.removeprefix("> ")
        else:
            continue
        continues = line.endswith("\\") or not _is_complete(commands[-1])
    return commands


def _is_complete(text: str) -> bool:
    """Whether loops, conditions and quotes that the text opens are closed in it."""
    words = re.findall(r"(?:^|[;\n]|\bdo\b|\bthen\b|&&|\|\|)\s*(for|while|until|if|case|done|fi|esac)\b", text)
    opened = sum(word in ("for", "while", "until", "if", "case") for word in words)
    closed = sum(word in ("done", "fi", "esac") for word in words)
    bare = re.sub(r"\\.|'[^']*'", "", re.sub(r'"(?:\\.|[^"\\])*"', "", text))
    return opened == closed and "'" not in bare.partition("#")[0] and '"' not in bare.partition("#")[0]


def _pieces(lines: Sequence[str]) -> Iterator[tuple[int, list[str]]]:
    """Fenced blocks with their fences, indented blocks, and every other line that is not empty, with its number."""
    number = 0
    while number < len(lines):
        line = lines[number]
        end = number + 1
        if fence := _FENCE.match(line):
            closing = fence["indent"] + "```"
            while end < len(lines) and lines[end].rstrip() != closing:
                end += 1
            end += 1
        elif _indent(line) >= _CODE_INDENT and (number == 0 or not lines[number - 1].strip()):
            while end < len(lines) and (_indent(lines[end]) >= _indent(line) or not lines[end].strip()):
                end += 1
        if line.strip():
            piece = list(lines[number:end])
            while not piece[-1].strip():
                piece.pop()
            yield number + 1, piece
        number = end


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip(" ")) if line.strip() else 0


def _block(page: str, number: int, lines: list[str], above: str) -> Block | None:
    """The block that a piece is; None for prose, data and output."""
    if fence := _FENCE.match(lines[0]):
        text = "\n".join(line.removeprefix(fence["indent"]) for line in lines[1:-1]) + "\n"
        if named := _FILE.match(above):
            return Block(page, number + 1, "file", text, path=named["path"])
        kind = LANGUAGES.get(fence["language"])
        return None if kind is None else Block(page, number + 1, kind, text)  # type: ignore[arg-type]
    indent = _indent(lines[0])
    if indent < _CODE_INDENT:
        return None
    text = "\n".join(line[indent:] for line in lines) + "\n"
    return Block(page, number, "shell", text) if _HAS_COMMAND.search(text.replace("\\\n", "")) else None


def _marked(block: Block, reason: str) -> Block:
    if reason not in REASONS:
        raise BadPage(f"{block.place}: the reason {reason!r} is unknown; there are {', '.join(REASONS)}.")
    if not re.search(REASONS[reason], block.text):
        raise BadPage(f"{block.place}: the block shows nothing of its reason {reason!r}; take the mark away.")
    return Block(block.page, block.line, block.kind, block.text, reason, block.path)


def _no_block(page: str, mark: tuple[int, str] | None) -> None:
    if mark is not None:
        raise BadPage(f"{page}:{mark[0]}: the mark is not followed by a block of commands.")
