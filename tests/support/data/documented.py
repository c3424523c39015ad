"""What the documentation tells people to type: its commands, flags, variables and files."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from tests.support.repository import ROOT

TOP_FOLDERS = "benchmarks|clients|deploy|docs|examples|protos|requirements|scripts|services|sluice/cli|sluice/v1|tests"

_FENCED = re.compile(r"^( *)```[^\n]*\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"`([^`]+)`")
_FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
_VARIABLE = re.compile(r"\bSLUICE_[A-Z0-9_]+")
_FILE = re.compile(rf"(?<![\w./-])(?:{TOP_FOLDERS})/[\w./*…-]*[\w*…]")
_ASSIGNMENT = re.compile(r"[A-Z][A-Z0-9_]*=")
_PROMPT = re.compile(r"^\s*\$ ")


@dataclass(frozen=True)
class Document:
    """A page of the documentation."""

    name: str
    text: str

    def code(self) -> Iterator[str]:
        """Everything set as code: the lines of blocks, with their continuations, and the spans inside sentences."""
        prose = self.text
        for block in _FENCED.finditer(self.text):
            prose = prose.replace(block.group(), "")
            yield from _lines(block.group(2))
        indented = [line for line in prose.splitlines() if line.startswith("    ")]
        yield from _lines("\n".join(indented))
        for span in _SPAN.finditer("\n".join(line for line in prose.splitlines() if not line.startswith("    "))):
            yield " ".join(span.group(1).split())

    def commands(self) -> Iterator[list[str]]:
        """The words of each piece of code, without variables set before it, and after it comments and redirections."""
        for line in self.code():
            try:
                words = shlex.split(line, comments=True)
            except ValueError:  # an apostrophe: no command
                continue
            while words and _ASSIGNMENT.match(words[0]):
                words = words[1:]
            ends = [place for place, word in enumerate(words) if word in ("&", "|", "&&", ">")]
            if words := words[: ends[0] if ends else None]:
                yield words

    def flags(self) -> set[str]:
        """Every --flag that stands in code."""
        return {flag for line in self.code() for flag in _FLAG.findall(line)}

    def variables(self) -> set[str]:
        """Every environment variable of Sluice; one that ends in _ stands for all that begin like this."""
        return set(_VARIABLE.findall(self.text))

    def files(self) -> set[str]:
        """Every file or folder of the repository, which may hold wildcards."""
        return {file.replace("…", "*") for line in self.code() for file in _FILE.findall(line)}


def flags_of(words: list[str]) -> list[str]:
    """The flags among the words of a command; what follows `--` belongs to another program."""
    own = words[: words.index("--")] if "--" in words else words
    return [word.partition("=")[0] for word in own if _FLAG.fullmatch(word.partition("=")[0])]


def documents() -> list[Document]:
    """All pages."""
    pages = ["README.md", "CONTRIBUTING.md", "docs/*.md", "benchmarks/README.md", "clients/python/README.md"]
    files = [file for page in pages for file in sorted(ROOT.glob(page))]
    return [Document(str(file.relative_to(ROOT)), file.read_text("utf-8")) for file in files]


def _lines(block: str) -> Iterator[str]:
    for line in re.sub(r"\\\n\s*", " ", block).splitlines():
        if line.strip():
            yield _PROMPT.sub("", line).strip()
