from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import SimpleNamespace

import pytest

from services.common.base.errors import unavailable
from services.gateway.backends.rpc.preprocess import TokenizerIdentity
from services.gateway.backends.workers.tokenizer_parity import (
    DIFFERS,
    PROVEN,
    SAME_FILES,
    UNKNOWN,
    TokenizerParity,
    compare,
    compare_media,
)
from services.preprocess.contract.tokenizer import ChatRequest
from services.preprocess.tokenizers.probes import PROBES, prompt_fingerprint
from tests.support.data.loaded_tokenizers import tekken, tiny_hf
from tests.support.waiting import settle


def worker(fingerprint: str = "", prompts: str = "", media: str = "") -> SimpleNamespace:
    return SimpleNamespace(fingerprint=fingerprint, prompt_fingerprint=prompts, media_fingerprint=media)


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        (None, ("f", "a,b"), UNKNOWN),
        (("f", "a,b"), ("f", "a,b"), PROVEN),
        (("f", "a,b"), ("other", "a,b"), PROVEN),  # other files, same prompts
        (("f", "a,b"), ("f", "a,c"), DIFFERS),  # same files, other prompts
        (("f", "a,-"), ("f", "a,c"), PROVEN),  # what one refuses proves nothing
        (("f", "-,-"), ("f", "a,c"), SAME_FILES),
        (("f", "a,b"), ("f", ""), SAME_FILES),
        (("f", ""), ("g", ""), DIFFERS),
        (("f", "a"), ("", ""), UNKNOWN),
        (("", ""), ("f", ""), UNKNOWN),
    ],
)
def test_comparison(ours: tuple[str, str] | None, theirs: tuple[str, str], expected: str) -> None:
    assert compare(None if ours is None else TokenizerIdentity("hf", *ours), worker(*theirs)) == expected


async def test_the_worst_of_a_models_workers_counts_and_is_asked_for_when_unknown() -> None:
    workers = [worker("f"), worker("f", "a")]
    answers: list[dict[str, TokenizerIdentity]] = []

    async def ask() -> dict[str, TokenizerIdentity]:
        if not answers:
            raise unavailable("no replica is up")
        return answers[-1]

    parity = TokenizerParity(ask, lambda model: workers, lambda: ["m"])
    await parity.freshen()
    assert parity.of_model("m")["parity"] == UNKNOWN
    answers.append({"m": TokenizerIdentity("hf", "f", "a")})
    await parity.freshen()
    assert parity.state("m") == UNKNOWN  # asked a moment ago
    parity._refreshed_at = float("-inf")
    await parity.freshen()
    assert parity.state("m") == SAME_FILES
    workers.append(worker("g"))
    assert parity.of_model("m") == {
        "parity": DIFFERS,
        "media_parity": UNKNOWN,
        "processor": "hf",
        "fingerprint": "f",
        "prompt_fingerprint": "a",
        "template": None,
        "worker_fingerprints": ["f", "g"],
        "worker_prompt_fingerprints": ["a"],
    }


async def test_model_entry_while_a_refresh_runs_waits_for_its_result() -> None:
    listed = asyncio.Event()

    async def ask() -> dict[str, TokenizerIdentity]:
        await listed.wait()
        return {"m": TokenizerIdentity("hf", "f", "a")}

    parity = TokenizerParity(ask, lambda model: [worker("f")], lambda: ["m"])
    periodic = asyncio.create_task(parity.run())
    await settle()
    freshened = asyncio.create_task(parity.freshen())
    await settle()
    assert not freshened.done()
    listed.set()
    await freshened
    assert parity.of_model("m")["fingerprint"] == "f"
    periodic.cancel()


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [("a,b", "a,b", PROVEN), ("a,b", "a,c", DIFFERS), ("a,-", "a,c", PROVEN), ("a", "", UNKNOWN), ("", "a", UNKNOWN)],
)
def test_comparison_of_media(ours: str, theirs: str, expected: str) -> None:
    assert compare_media(TokenizerIdentity("hf", "f", "p", ours), worker("f", "p", theirs)) == expected
    assert compare_media(None, worker("f", "p", theirs)) == UNKNOWN


async def test_media_fingerprints_of_preprocess_are_passed_on_and_the_worst_worker_counts() -> None:
    workers = [worker(media="a"), worker(media="b"), worker()]
    passed_on: list[Mapping[str, str]] = []

    async def ask() -> dict[str, TokenizerIdentity]:
        return {"m": TokenizerIdentity("hf", "f", "p", "a")}

    parity = TokenizerParity(ask, lambda model: workers, lambda: ["m"], passed_on.append)
    await parity.freshen()
    assert passed_on == [{"m": "a"}]
    assert parity.of_model("m")["media_parity"] == DIFFERS
    del workers[1]
    assert parity.of_model("m")["media_parity"] == UNKNOWN
    del workers[1]
    assert parity.of_model("m")["media_parity"] == PROVEN


def test_the_fixed_set_tells_tokenizers_apart_and_knows_them_again() -> None:
    tiny, other = prompt_fingerprint(tiny_hf()), prompt_fingerprint(tekken())
    assert tiny == prompt_fingerprint(tiny_hf())
    assert len(tiny.split(",")) == len(other.split(",")) == len(PROBES)
    assert "-" not in tiny.split(",")
    assert all(one != another for one, another in zip(tiny.split(","), other.split(","), strict=True))


def test_a_class_that_fails_refuses_as_far_as_the_fixed_set_is_concerned() -> None:
    class Failing(type(tiny_hf())):  # type: ignore[misc]
        def __init__(self) -> None:
            self.facts = tiny_hf().facts

        def encode_chat(self, chat: ChatRequest) -> list[int]:
            raise ZeroDivisionError

    assert set(prompt_fingerprint(Failing()).split(",")) == {"-"}
