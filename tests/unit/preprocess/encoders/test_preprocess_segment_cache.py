from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from sys import getsizeof

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from services.common.packages.model_files import resolve
from services.preprocess.contract.tokenizer import ChatRequest, TokenizerProtocol
from services.preprocess.encoders.backend import Backend, EncoderOptions
from services.preprocess.encoders.segment_cache import ENTRY_OVERHEAD, SegmentCache
from services.preprocess.tokenizers.hf import HfTokenizer
from services.preprocess.tokenizers.mistral import MistralTokenizer
from tests.support.data.conversations import conversations, turns
from tests.support.data.loaded_tokenizers import limits
from tests.support.data.tokenizer_families import EXACT

LIMIT = 4000
SMALL_CACHE = 100_000


class Counting(Backend):
    """Ids are the text's own bytes; remembers what it was asked for."""

    name = "counting"

    def __init__(self) -> None:
        self.asked: list[str] = []

    def encode(self, texts: Sequence[str]) -> list[bytes]:
        self.asked += texts
        return [text.encode("utf-32-le") for text in texts]


def test_a_text_is_encoded_once_and_the_rest_in_one_go() -> None:
    backend = Counting()
    cache = SegmentCache(backend, LIMIT)
    assert cache.encode(["a", "bb"]) == [b"a\0\0\0", b"b\0\0\0b\0\0\0"]
    assert cache.encode(["bb", "c", "a", "c"]) == Counting().encode(["bb", "c", "a", "c"])
    assert backend.asked == ["a", "bb", "c", "c"]
    stats = cache.stats
    assert (stats.entries, stats.hit, stats.missed, stats.limit) == (3, 3, 5, LIMIT)
    assert cache.name == "counting"


def test_the_least_recently_used_is_forgotten_first() -> None:
    backend = Counting()
    size = getsizeof("a") + getsizeof(b"1234") + ENTRY_OVERHEAD
    cache = SegmentCache(backend, 5 * size)
    for text in "abcdeaf":
        cache.encode([text])
    backend.asked.clear()
    cache.encode(["a", "c", "d", "e", "f"])
    assert backend.asked == []
    cache.encode(["b"])
    assert backend.asked == ["b"]


def test_what_would_push_out_most_of_the_others_is_not_remembered() -> None:
    cache = SegmentCache(Counting(), LIMIT)
    cache.encode(["a", "x" * LIMIT])
    assert cache.stats.entries == 1


def test_what_a_backend_refuses_leaves_nothing_behind() -> None:
    class Refusing(Counting):
        def encode(self, texts: Sequence[str]) -> list[bytes]:
            raise ValueError("no")

    cache = SegmentCache(Refusing(), LIMIT)
    with pytest.raises(ValueError, match="no"):
        cache.encode(["a"])
    assert (cache.stats.entries, cache.stats.held) == (0, 0)


class CacheMachine(RuleBasedStateMachine):
    """Whatever is asked in whatever order: right ids, and never more memory than allowed."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = SegmentCache(Counting(), LIMIT)

    @rule(texts=st.lists(st.text(max_size=40) | st.sampled_from(["same", "x" * 300, "x" * 5000])))
    def encode(self, texts: list[str]) -> None:
        assert self.cache.encode(texts) == Counting().encode(texts)

    @invariant()
    def memory_is_counted_and_bounded(self) -> None:
        held = sum(getsizeof(t) + getsizeof(i) + ENTRY_OVERHEAD for t, i in self.cache._ids.items())
        assert self.cache.stats.held == held <= LIMIT


TestCacheMachine = CacheMachine.TestCase


def test_many_threads_share_a_cache() -> None:
    cache = SegmentCache(Counting(), LIMIT)
    failures: list[str] = []

    def use(start: int) -> None:
        for index in range(start, start + 500):
            texts = [str(index % 17), str(index), "same"]
            if cache.encode(texts) != Counting().encode(texts):
                failures.append(str(texts))

    threads = [threading.Thread(target=use, args=(start,)) for start in range(0, 40, 10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not failures
    held = sum(getsizeof(t) + getsizeof(i) + ENTRY_OVERHEAD for t, i in cache._ids.items())
    assert cache.stats.held == held <= LIMIT


BUNDLED = {
    "tekken": "tekken_240911",
    "spm1": "tokenizer.model.v1",
    "spm3": "mistral_instruct_tokenizer_240323.model.v3",
    "spm7": "mistral_instruct_tokenizer_241114.model.v7",
}


def pair(name: str, folder: Path, fast: bool) -> tuple[TokenizerProtocol, TokenizerProtocol]:
    """The same tokenizer with a small cache and, by the reference library, without one."""
    with_cache, without = EncoderOptions(fast, SMALL_CACHE), EncoderOptions(fast_backend=False, cache_bytes=0)
    if name in EXACT:
        path = EXACT[name](folder)
        return HfTokenizer(path, limits(), with_cache), HfTokenizer(path, limits(), without)
    file = resolve(f"mistral-common:{BUNDLED[name]}")
    return MistralTokenizer(file, with_cache), MistralTokenizer(file, without)


def compare(name: str, folder: Path, fast: bool, count: int, seed: int) -> None:
    on, off = pair(name, folder, fast)
    assert off.cache_stats is None
    for messages in conversations(seed, count):
        for growing in turns(messages):
            chat = ChatRequest(growing)
            assert on.encode_chat(chat) == off.encode_chat(chat), growing
        assert on.cache_stats is not None
        assert on.cache_stats.held <= SMALL_CACHE
    stats = on.cache_stats
    assert stats is not None
    assert stats.hit > stats.missed > SMALL_CACHE / 10


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("name", [*EXACT, *BUNDLED])
def test_with_and_without_cache_ids_are_the_same(name: str, fast: bool, tmp_path: Path) -> None:
    compare(name, tmp_path, fast, count=60, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("name", [*EXACT, *BUNDLED])
def test_with_and_without_cache_ten_thousand_conversations_have_the_same_ids(
    name: str, fast: bool, tmp_path: Path
) -> None:
    compare(name, tmp_path, fast, count=10_000, seed=2)
