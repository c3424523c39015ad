"""Generates the mock engine's output: names media items, repeats the user's words, then adds sentences up to a length.

A prompt with `<<<script: TEXT>>>` produces exactly TEXT, that of the last one, so that tests and demonstrations can
produce tool calls and reasoning of any model. Special tokens in TEXT become special tokens of the output. A structured
output constraint determines the whole output. `<<<script64: TEXT>>>` is the same with TEXT in base64, which survives
the quotes that a chat template puts around the output of a tool.
"""

from __future__ import annotations

import re
from array import array
from base64 import b64decode
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random

from xxhash import xxh3_64_intdigest

from services.common.base.packing import pack_u32
from services.worker.contract.generation import FinishReason, GenerateRequest, MediaItem, StopParams
from services.worker.engines.mock.guided import guided_text
from services.worker.engines.mock.vocabulary import MockVocabulary

SHORTEST, LONGEST = 30, 200
ECHO_WORDS = 16
ECHO_TOKENS = 64
SEARCHED_TOKENS = 2_048
SCRIPT_TOKENS = 512  # at the end of a prompt, searched first
PROMPT_TOKENS = 1 << 16  # at the end of a prompt, searched if a token of them may begin a script
SENTENCES = 1_024
SCRIPT = re.compile(r"<<<script(64)?: (.*?)>>>(?!>)", re.DOTALL)
CHOICE = re.compile(r"-(\d{1,3})$")
ROLES = ("system", "user", "assistant", "tool")

_ADJECTIVES = """
quiet bright narrow gentle early distant silver heavy patient hollow careful northern amber steady little winding open
curious broad slow
"""
_NOUNS = """
river gate water boat bridge field lamp garden mountain letter window harbour forest village engine sluice meadow stone
bird keeper
"""
_VERBS = """
follows opens carries meets watches crosses leaves finds holds remembers turns reaches passes guards hears answers lifts
measures greets repairs
"""
_ENDINGS = "at dawn,before winter,without a word,in the rain,once more,by the wall,after dark,for a while"


@dataclass(frozen=True, slots=True)
class Answer:
    """A complete output: array("I") of token ids, and why it ends after the last one."""

    token_ids: array[int]
    reason: FinishReason
    stop_token_id: int | None = None


AnswerFor = Callable[[GenerateRequest, int], Answer]


class TextGenerator:
    """Generates output, determined by the prompt and the seed.

    Without a seed, the number at the end of a request id such as `chat-1` replaces it, so that the choices of one
    request differ. A request resumed on another worker continues with the output of the first worker.
    """

    def __init__(self, vocabulary: MockVocabulary) -> None:
        self._vocabulary = vocabulary
        self._sentences = _sentences(vocabulary)
        self._script_starts = _script_starts(vocabulary)

    def answer(self, request: GenerateRequest, limit: int) -> Answer:
        """Returns an output of 1 to `limit` tokens, including a stop or end-of-sequence id.

        Raises:
            SluiceError: INVALID_ARGUMENT for a constraint that the mock engine does not support.
        """
        stop = request.stop
        resumed = request.resumed_tokens
        prompt = request.token_ids[: len(request.token_ids) - resumed] if resumed else request.token_ids
        random = self._random(request, prompt)
        length = max(random.randint(SHORTEST, LONGEST), resumed + stop.min_tokens)
        endless = stop.ignore_eos and request.guided is None
        forced = None if endless else self._forced(request, prompt, random)
        if forced is not None:
            length = len(forced)
        elif endless:
            length = resumed + limit
        story = self._story(prompt, request.media, random, min(length, resumed + limit)) if forced is None else forced
        eos = () if endless else (stop.eos_token_ids or self._vocabulary.eos_ids)[:1]
        ended = not endless and len(story) >= length
        if ended:
            story.extend(eos)
        rest = story[resumed : resumed + limit] or array("I", eos or self._sentences[0][:1])
        return _cut(rest, stop, self._vocabulary.eos_ids, ended and len(story) - resumed <= limit, eos)

    def _random(self, request: GenerateRequest, prompt: array[int]) -> Random:
        seed = request.sampling.seed
        if seed is None and (choice := CHOICE.search(request.request_id)):
            seed = int(choice[1])
        return Random(_seed(prompt, seed))

    def _forced(self, request: GenerateRequest, prompt: array[int], random: Random) -> array[int] | None:
        """Returns the output required by the constraint, else by the prompt's last script; None without either."""
        if request.guided is not None:
            return array("I", self._vocabulary.encode(guided_text(request.guided, random)))
        scripts = SCRIPT.findall(self._vocabulary.decode(prompt[-SCRIPT_TOKENS:]))
        if not scripts and not self._script_starts.isdisjoint(prompt[-PROMPT_TOKENS:]):
            scripts = SCRIPT.findall(self._vocabulary.decode(prompt[-PROMPT_TOKENS:]))
        return array("I", self._vocabulary.encode_marked(_script(*scripts[-1]))) if scripts else None

    def _story(self, prompt: array[int], media: Sequence[MediaItem], random: Random, length: int) -> array[int]:
        """Returns the media items, the echo and complete sentences, with at least `length` tokens in total."""
        story = array("I", self._vocabulary.encode("; ".join(map(_named, media)) + ". ") if media else ())
        story += self._echo(prompt)
        while len(story) < length:
            for sentence in random.choices(self._sentences, k=8):
                story.extend(sentence)
                if len(story) >= length:
                    break
        return story

    def _echo(self, prompt: array[int]) -> array[int]:
        words = _without_role(self._vocabulary.decode(self._last_message(prompt))).replace("\ufffd", " ").split()
        echo = " ".join(words[:ECHO_WORDS])
        end = "" if echo.endswith((".", "!", "?")) else "."
        return array("I", self._vocabulary.encode(f"You said: {echo}{end}" if echo else "You said nothing."))

    def _last_message(self, prompt: array[int]) -> array[int]:
        """Returns the start of the last message: the text between the last control ids of the chat template.

        A prompt that ends in text ends with a header such as "assistant", or is not a chat; in that case the longest
        of the last three pieces is the message.
        """
        pieces: list[array[int]] = []
        for piece in _pieces_from_end(prompt, self._vocabulary.special_ids):
            pieces.append(piece)
            if prompt[-1] in self._vocabulary.special_ids or len(pieces) == 3:
                break
        return max(pieces, key=len, default=array("I"))[:ECHO_TOKENS]


def _pieces_from_end(prompt: array[int], special_ids: frozenset[int]) -> Iterator[array[int]]:
    first = max(len(prompt) - SEARCHED_TOKENS, 0)
    end = len(prompt)
    for index in range(len(prompt) - 1, first - 1, -1):
        if prompt[index] in special_ids:
            if index + 1 < end:
                yield prompt[index + 1 : end]
            end = index
    if first < end:
        yield prompt[first:end]


def _named(item: MediaItem) -> str:
    """Returns such as "image 1024 bytes 0123abcd": kind, size, and the beginning of the content hash."""
    return f"{item.span.kind.capability} {len(item.file.data)} bytes {item.file.hash[:4].hex()}"


def _without_role(text: str) -> str:
    head, newline, rest = text.lstrip().partition("\n")
    return rest if newline and head.strip() in ROLES else text


def _cut(rest: array[int], stop: StopParams, eos_ids: tuple[int, ...], ended: bool, eos: tuple[int, ...]) -> Answer:
    """Truncates an output after the first effective stop id."""
    stops = stop.stop_token_ids
    if stop.ignore_eos:
        stops = stops.difference(stop.eos_token_ids, eos_ids)
    if not stops.isdisjoint(rest):
        for index in range(stop.min_tokens, len(rest)):
            if rest[index] in stops:
                return Answer(rest[: index + 1], FinishReason.STOP, rest[index])
    if ended:
        return Answer(rest, FinishReason.STOP, eos[0] if eos else None)
    return Answer(rest, FinishReason.LENGTH)


def _seed(prompt: array[int], seed: int | None) -> int:
    return xxh3_64_intdigest(pack_u32(prompt), (seed or 0) & (2**64 - 1))


def _script(coded: str, text: str) -> str:
    if not coded:
        return text
    try:
        return b64decode(text, validate=True).decode()
    except ValueError:
        return f"This script is not base64: {text}"


def _script_starts(vocabulary: MockVocabulary) -> frozenset[int]:
    """Returns the ids of the tokens that may begin a script."""
    starts = (vocabulary.encode(f"{before}<<<script: x") for before in ("", "a", " ", "\n", '"', ".", "("))
    return frozenset(next((each for each in ids if "<" in vocabulary.decode([each])), ids[0]) for ids in starts)


def _sentences(vocabulary: MockVocabulary) -> list[array[int]]:
    # A SentencePiece tokenizer prefixes every text with a space; a byte-level one does not.
    adds_space = vocabulary.decode([*vocabulary.encode("a"), *vocabulary.encode("b")]) == "a b"
    space = "" if adds_space else " "

    def encoded(phrases: list[str]) -> list[list[int]]:
        return [vocabulary.encode(space + phrase) for phrase in phrases]

    adjectives, nouns, verbs = (encoded(words.split()) for words in (_ADJECTIVES, _NOUNS, _VERBS))
    endings = encoded(_ENDINGS.split(","))
    opening, article = encoded(["The", "the"])
    random = Random(0)
    pick = random.choice
    stop = vocabulary.encode(".")
    return [
        array("I", [*opening, *pick(adjectives), *pick(nouns), *pick(verbs), *article, *pick(nouns), *ending, *stop])
        for ending in random.choices([[], *endings], k=SENTENCES)
    ]
