"""Text that a stranger chose costs time in proportion to its length, in every tokenizer and in every parser."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from services.common.base.packing import unpack_u32
from services.common.packages.model_files import DEFAULT_SOURCE, resolve
from services.postprocess.detokenize.stream import FinishReason, Limits, Stream, StreamOptions
from services.postprocess.detokenize.vocabulary import ParserNames
from services.postprocess.parsers.base import ParserContext
from services.postprocess.parsers.registry import REASONING_PARSERS, TOOL_PARSERS, build, markers_of
from services.postprocess.streams.parsed import ParsedStream
from services.preprocess.contract.tokenizer import TokenizerProtocol
from services.preprocess.encoders.backend import EncoderOptions
from services.preprocess.tokenizers.hf import HfTokenizer
from services.preprocess.tokenizers.mistral import MistralTokenizer
from tests.support.data.loaded_tokenizers import limits
from tests.support.data.tokenizer_families import EXACT
from tests.support.data.vocabularies import tekken
from tests.support.oracles.growth import growth
from tests.support.oracles.parsing import TOOLS, said

TIMES = 8
PARSED_BOUND = 3.0
TOKENIZED_BOUND = 5.0
"""Of TIMES for what is quadratic; merging in a heap that outgrows the processor's caches makes a character dearer."""

UNITS = ("\n", " ", "\t", "a", "ab", "\r\n", "😀", "你", ".", "1", " \n", "\u3000")


def _repeated(unit: str) -> Callable[[int], str]:
    return lambda size: (unit * size)[:size]


RUNS: dict[str, Callable[[int], str]] = {
    **{f"{unit!r} repeated": _repeated(unit) for unit in UNITS},
    "runs of spaces": lambda size: (" " * (size // 16) + "x") * 16,
    "runs of newlines": lambda size: ("\n" * (size // 16) + "x") * 16,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @cache
    def folder(name: str) -> Path:
        return EXACT[name](tmp_path_factory.mktemp(name))

    return folder


@cache
def _tokenizer(name: str, folders: Callable[[str], Path], fast: bool) -> TokenizerProtocol:
    speed = EncoderOptions(fast_backend=fast, cache_bytes=0)
    return (
        MistralTokenizer(resolve(DEFAULT_SOURCE), speed)
        if name == "tekken"
        else HfTokenizer(folders(name), limits(), speed)
    )


@pytest.mark.parametrize("name", ["tekken", *EXACT])
def test_a_run_of_any_character_is_tokenized_in_linear_time_to_the_ids_of_the_reference(
    name: str, folders: Callable[[str], Path]
) -> None:
    reference, fast = (_tokenizer(name, folders, fast) for fast in (False, True))
    tokenizers = {one.facts.backend: one for one in (reference, fast)}
    for label, run in RUNS.items():
        ids = {backend: one.pack_text(run(40_000), add_special_tokens=False) for backend, one in tokenizers.items()}
        assert len(set(ids.values())) == 1, f"{label}: {list(ids)} differ"
        for backend, one in tokenizers.items():

            def tokenize(size: int, one: TokenizerProtocol = one, run: Callable[[int], str] = run) -> object:
                return one.pack_text(run(size), False)

            cost = growth(tokenize, 32_000, TIMES, TOKENIZED_BOUND)
            assert cost < TOKENIZED_BOUND, f"{label} with {backend}"


@pytest.mark.parametrize("name", ["tekken", *EXACT])
def test_random_texts_with_long_runs_have_the_ids_of_the_reference(name: str, folders: Callable[[str], Path]) -> None:
    reference, fast = (_tokenizer(name, folders, fast) for fast in (False, True))
    draw = random.Random(name)
    for number in range(8):
        pieces = [draw.choice(UNITS) * draw.choice((1, 2, 7, 300, (16 << 10) - 1, 16 << 10)) for _ in range(8)]
        text = "".join(pieces)
        expected = reference.pack_text(text, add_special_tokens=False)
        assert fast.pack_text(text, add_special_tokens=False) == expected, f"text {number}"
        if isinstance(reference, MistralTokenizer):
            plain = reference._text.encode(text, bos=False, eos=False)  # as mistral-common itself does it
            assert unpack_u32(expected).tolist() == plain, f"text {number}"


def _texts(names: ParserNames) -> dict[str, Callable[[int], str]]:
    """Texts that a parser may want to hold, by what is in them."""
    start = next(iter(getattr(TOOL_PARSERS.get(names.tool), "starts", ())), "") or getattr(
        REASONING_PARSERS.get(names.reasoning), "start", ""
    )
    name = TOOLS[1]["function"]["name"]
    call = json.dumps({"name": name, "arguments": {"city": "x"}})
    texts: dict[str, Callable[[int], str]] = {
        "white space": lambda size: " \n" * (size // 2),
        "white space before text": lambda size: " " * size + "x",
        "white space inside": lambda size: "x" + "\n" * size + "x",
        "letters": lambda size: "x" * size,
        "what begins a marker": lambda size: "<" * size,
        "white space in a call": lambda size: start + " " * size,
        "white space after a bracket": lambda size: start + "[" + " " * size,
        "an endless name": lambda size: start + '{"name": "' + "a" * size,
        "arguments before the name": lambda size: start + '{"arguments": {"x": "' + "a" * size,
        "a key beside the arguments": lambda size: start + call[:-1] + ', "other": "' + "a" * size,
        "white space between calls": lambda size: start + call + ";" + " " * size,
    }
    form = getattr(TOOL_PARSERS.get(names.tool), "form", None)
    if form is not None:
        head = f"{start}{name}{form.name_ends[0]}{form.key_start}days{form.key_end}{form.value_start}"
        texts["a value that is no string"] = lambda size: head + "1" * size
    return texts


PARSERS = [
    *(ParserNames(tool=name) for name in sorted(TOOL_PARSERS) if name not in ("qwen", "deepseek_r1")),
    *(ParserNames(reasoning=name) for name in ("think", "deepseek_r1", "mistral", "harmony")),
    ParserNames("hermes", "think"),
]


def _run(names: ParserNames, text: str) -> ParsedStream:
    """Feeds a text as tokens of one character each."""
    known = tekken()
    vocabulary = known.vocabulary
    stream = Stream(StreamOptions("m"), vocabulary, Limits(), markers_of(names))
    parsed = ParsedStream(stream, build(names, ParserContext(TOOLS, identity="r")))
    token_of = {char: known.encode(char) for char in set(text)}
    parsed.feed([token for char in text for token in token_of[char]])
    parsed.end(FinishReason.STOP)
    return parsed


@pytest.mark.parametrize("names", PARSERS, ids=str)
def test_a_built_in_parser_takes_linear_time_whatever_it_holds(names: ParserNames) -> None:
    for label, text in _texts(names).items():

        def parse(size: int, text: Callable[[int], str] = text) -> object:
            return _run(names, text(size))

        cost = growth(parse, 2_000, TIMES, PARSED_BOUND)
        assert cost < PARSED_BOUND, label


@pytest.mark.parametrize("names", PARSERS, ids=str)
def test_one_long_piece_takes_linear_time_and_comes_out_like_many_short_ones(names: ParserNames) -> None:
    def in_one(text: str) -> object:
        parser = build(names, ParserContext(TOOLS, identity="r"))
        return said([*parser.feed(text), *parser.finish()])

    for label, text in _texts(names).items():
        sample = text(6_000)
        assert in_one(sample) == said(_run(names, sample).events), label

        def parse(size: int, text: Callable[[int], str] = text) -> object:
            return in_one(text(size) * 4)

        cost = growth(parse, 3_000, TIMES, PARSED_BOUND)
        assert cost < PARSED_BOUND, label


def test_white_space_in_the_head_of_a_deepseek_call_takes_linear_time() -> None:
    start = TOOL_PARSERS["deepseek_v3"].starts[0]  # type: ignore[attr-defined]

    def heads(spaces: int) -> None:
        _run(ParserNames("deepseek_v3"), (start + " " * spaces + "{") * 8)

    assert growth(heads, 60, TIMES, PARSED_BOUND) < PARSED_BOUND
