"""Cases for parsers: answers of every format, whole, damaged and made of fragments, and how they are cut.

`case` draws from any `random.Random`: hypothesis' own in the tests, a seeded one when very many are wanted:

    make test-parsers
    make test-parsers ARGS="--parser hermes --seed 4711 --cases 1"    # one that failed, again
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import multiprocessing.pool
import os
import random
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from services.postprocess.detokenize.vocabulary import ParserNames
from services.postprocess.parsers.calls.parser import CallParser
from services.postprocess.parsers.families.harmony import HarmonyParser
from services.postprocess.parsers.families.think import ImpliedThinkParser
from services.postprocess.parsers.registry import REASONING_PARSERS, TOOL_PARSERS
from tests.support.data.call_formats import FORMATS
from tests.support.oracles.parsing import COMMON, MARKUP, RECORDED, TOOLS, WORDS, parsed, pieces_of

LOST_WORD = "Kq7"
"""A word that no answer has."""
TOOL_NAMES = frozenset(tool["function"]["name"] for tool in TOOLS)
GOOD = ("get_weather", {"city": "Zürich 🌧️", "days": 3})
CHUNK = 500
"""Cases that a process does at a time."""

Names = tuple[str, str]


def label(names: Names) -> str:
    """What a pair of parsers is called: `hermes`, `think`, `qwen+qwen3`."""
    return "+".join(filter(None, names))


def answer(names: Names, draw: random.Random) -> str:
    """A recorded answer with something cut out or put in, or fragments of the format in any order."""
    fragments = (*MARKUP[names], *MARKUP[names], *COMMON, *WORDS)
    if draw.random() < 0.5:
        return "".join(draw.choice(fragments) for _ in range(draw.randint(0, 14)))
    text = draw.choice(RECORDED[names])
    start = draw.randint(0, len(text))
    inserted = draw.choice(fragments) if draw.random() < 0.5 else ""
    removed = draw.randint(0, 12) if draw.random() < 0.5 else 0
    return text[:start] + inserted + text[start + removed :]


def case(names: Names, draw: random.Random) -> tuple[str, list[int]]:
    """An answer and up to 12 places to cut it."""
    text = answer(names, draw)
    return text, [draw.randint(0, len(text)) for _ in range(draw.randint(0, 12))]


def check(names: Names, text: str, cuts: Sequence[int]) -> None:
    """The output does not depend on the pieces of the text, nor on `Parser.plain`."""
    parsers = ParserNames(*names)
    whole = parsed(parsers, [text])
    assert parsed(parsers, pieces_of(text, cuts)) == whole, f"cut at {sorted(cuts)}: {text!r}"
    assert parsed(parsers, list(text)) == whole, f"one character at a time: {text!r}"
    assert parsed(parsers, pieces_of(text, cuts), plain=True) == whole, f"plain, cut at {sorted(cuts)}: {text!r}"
    assert parsed(parsers, list(text), plain=True) == whole, f"plain, one character at a time: {text!r}"
    check_names(names, text)


_IS_PLAIN = re.compile(r"[A-Za-z0-9_.:-]{1,256}").fullmatch


def check_names(names: Names, text: str) -> None:
    """Every call has the name of a tool of the request, or a plain one without markup."""
    for name, _, _ in parsed(ParserNames(*names), [text]).calls:
        assert name in TOOL_NAMES or _IS_PLAIN(name), f"the name {name!r}: {text!r}"


def formats_of(names: Names) -> list[str]:
    """The formats of calls that a pair of parsers reads, of those whose calls begin with a marker."""
    tool = TOOL_PARSERS.get(names[0])
    marked = tool is HarmonyParser or (tool is not None and issubclass(tool, CallParser) and tool.marked)
    return [name for name, form in FORMATS.items() if marked and TOOL_PARSERS[form.parser] is tool]


def damaged(names: Names, name: str, draw: random.Random) -> str:
    """A call that is cut before its arguments, text, and a whole call of `get_weather`."""
    render = FORMATS[name].render
    broken = draw.choice(("look_up", "get_weather", "look_up and_more"))
    text = render([(broken, {"city": "x"})])
    start, end = text.rindex(broken), text.rindex(broken) + len(broken)
    between = draw.choice(("", "\n", " ", " more words ", "}", ")", '"'))
    thought = "</think>" if REASONING_PARSERS.get(names[1]) is ImpliedThinkParser else ""
    return thought + text[: draw.randint(start, end)] + between + render([GOOD])


def check_recovered(names: Names, text: str) -> None:
    """A damaged call is text, or one without arguments, is marked, and takes nothing of the call that follows."""
    found = parsed(ParserNames(*names), [text])
    calls = [(name, json.loads(arguments)) for name, arguments, _ in found.calls]
    assert calls[-1:] == [GOOD], f"the whole call is missing in {calls}: {text!r}"
    assert all(arguments == {} for _, arguments in calls[:-1]), f"{calls}: {text!r}"
    assert found.degraded or len(calls) > 1, f"damaged without a mark: {text!r}"


def mutant(names: Names, draw: random.Random) -> str:
    """A recorded answer with a word put in anywhere, and something cut out or the end missing."""
    text = draw.choice(RECORDED[names])
    start = draw.randint(0, len(text))
    text = text[:start] + text[start + draw.choice((0, 0, 1, 2, draw.randint(3, 12))) :]
    if draw.random() < 0.2:
        text = text[: draw.randint(0, len(text))]
    place = draw.randint(0, len(text))
    return text[:place] + LOST_WORD + text[place:]


def check_kept(names: Names, text: str) -> None:
    """The word that a mutant has more is in the output, or the output is marked."""
    found = parsed(ParserNames(*names), [text])
    everything = [found.content, found.reasoning, *(part for call in found.calls for part in call)]
    assert found.degraded or any(LOST_WORD in part for part in everything), f"lost without a mark: {text!r}"


@dataclass(frozen=True)
class _Chunk:
    names: Names
    first: int
    count: int


@dataclass(frozen=True)
class _Outcome:
    chunk: _Chunk
    failure: str = ""
    again: str = ""


def _run(chunk: _Chunk) -> _Outcome:
    """The cases of seeds `first` to `first + count - 1`, up to the first that fails."""
    for seed in range(chunk.first, chunk.first + chunk.count):
        draw = random.Random(seed)
        text, cuts = case(chunk.names, draw)
        try:
            check(chunk.names, text, cuts)
            check_kept(chunk.names, mutant(chunk.names, draw))
            for name in formats_of(chunk.names):
                text = damaged(chunk.names, name, draw)
                check(chunk.names, text, cuts)
                check_recovered(chunk.names, text)
        except Exception as error:
            again = f"--parser {label(chunk.names)} --seed {seed} --cases 1"
            return _Outcome(chunk, f"{type(error).__name__}: {error}", again)
    return _Outcome(chunk)


def _chunks(names: Names, seed: int, cases: int) -> Iterator[_Chunk]:
    for start in range(0, cases, CHUNK):
        yield _Chunk(names, seed + start, min(CHUNK, cases - start))


def sweep(pool: multiprocessing.pool.Pool, names: Names, seed: int, cases: int) -> str:
    """Runs one parser's cases with a line of progress; what failed, empty for nothing."""
    done, started, reported = 0, time.monotonic(), 0.0
    for outcome in pool.imap_unordered(_run, _chunks(names, seed, cases)):
        if outcome.failure:
            print(
                f"\n{label(names)}: FAILED: {outcome.failure}\n"
                f"again with\n  python -m tests.support.data.parser_cases {outcome.again}",
                flush=True,
            )
            return outcome.failure
        done += outcome.chunk.count
        now = time.monotonic()
        if sys.stdout.isatty() and now - reported > 0.5:
            print(f"\r{label(names):<26} {done:>9,} of {cases:,}", end="", flush=True)
            reported = now
    print(f"\r{label(names):<26} {done:>9,} cases  {time.monotonic() - started:6.0f} s  none failed", flush=True)
    return ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; 1 when a case failed."""
    names = {label(pair): pair for pair in MARKUP}
    parser = argparse.ArgumentParser(description="Cuts and damages answers of every built-in parser.")
    parser.add_argument("--cases", type=int, default=100_000, help="of each parser")
    parser.add_argument("--parser", action="append", choices=sorted(names), help="only these; repeatable")
    parser.add_argument("--seed", type=int, default=0, help="of the first case; each has the next number")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args(arguments)
    started, chosen = time.monotonic(), options.parser or list(names)
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        failures = [sweep(pool, names[name], options.seed, options.cases) for name in chosen]
    failed = sum(map(bool, failures))
    print(f"{len(chosen)} parsers, {options.cases:,} cases each, {failed} failed, {time.monotonic() - started:.0f} s")
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
