"""Policies against mock workers in virtual time: what the trace benchmark shows, on a small trace of its own."""

from __future__ import annotations

from itertools import count
from random import Random

import pytest
from trace_fleet import Arrival, Outcome, Shape, Simulation, tokens_of, without_reuse

FLEET = Shape(workers=4, cache_tokens=262_144, max_waiting=32)


def conversations(chats: int, turns: int, per_s: float, seed: int) -> list[Arrival]:
    """Requests that arrive at random; a turn's prompt is the one before and two to six new blocks of 512 tokens."""
    random, now, number = Random(seed), 0.0, 0
    left, said = [turns] * chats, [()] * chats
    arrivals = []
    while any(left):
        now += random.expovariate(per_s)
        who = random.choice([each for each, turns_left in enumerate(left) if turns_left])
        left[who] -= 1
        fresh = random.randint(2, 6)
        said[who] = (*said[who], *range(number, number + fresh))
        number += fresh
        arrivals.append(Arrival(now, 512 * len(said[who]) + 3, random.randint(20, 80), said[who]))
    return arrivals


async def run(arrivals: list[Arrival], policy: str, shape: Shape = FLEET) -> Outcome:
    outcome = await Simulation(arrivals, policy, 1.0, shape).run(lambda _: None)
    assert outcome.offered == len(arrivals)
    assert len(outcome.ttft_s) + outcome.shed == outcome.offered
    return outcome


def mean(seconds: list[float]) -> float:
    return sum(seconds) / len(seconds)


async def test_near_saturation_kv_halves_the_wait_for_the_first_token() -> None:
    arrivals = conversations(chats=40, turns=12, per_s=11.0, seed=3)
    kv, blind = await run(arrivals, "kv"), await run(arrivals, "round_robin")
    assert mean(kv.ttft_s) * 2 <= mean(blind.ttft_s)
    assert kv.shed <= blind.shed
    assert kv.cached_tokens > 2 * blind.cached_tokens


async def test_with_nothing_to_reuse_kv_is_least_loaded() -> None:
    arrivals = without_reuse(conversations(chats=20, turns=6, per_s=6.0, seed=4))
    kv, blind = await run(arrivals, "kv"), await run(arrivals, "least_loaded")
    assert kv.cached_tokens == blind.cached_tokens == 0
    assert mean(kv.ttft_s) <= 1.1 * mean(blind.ttft_s)


async def test_default_weight_of_prefill_shortens_the_wait_of_mixed_prompts() -> None:
    random, numbers, now = Random(1), count(), 0.0
    arrivals = []
    for _ in range(500):
        now += random.expovariate(14)
        tokens = random.choice((1_000, 2_000, 8_000, 40_000))
        ids = tuple(next(numbers) for _ in range(-(-tokens // 512)))
        arrivals.append(Arrival(now, tokens, random.randint(50, 600), ids))
    default = await run(arrivals, "kv", Shape())
    even = await run(arrivals, "kv", Shape(prefill_load_scale=1.0))
    assert mean(default.ttft_s) < 0.95 * mean(even.ttft_s)
    assert mean(default.inter_token_s) <= 1.05 * mean(even.inter_token_s)


async def test_a_full_queue_sheds_and_the_rest_is_served() -> None:
    burst = [Arrival(0.0, 5_000, 50, tuple(range(10 * each, 10 * each + 10))) for each in range(60)]
    outcome = await run(burst, "least_loaded", Shape(workers=2, cache_tokens=65_536, max_sequences=4, max_waiting=5))
    assert outcome.shed == 60 - 2 * (4 + 5)


@pytest.mark.parametrize("tokens", [1, 511, 512, 1_300])
def test_equal_ids_are_equal_blocks(tokens: int) -> None:
    prompt = tokens_of(Arrival(0.0, tokens, 1, (7, 8)))
    assert len(prompt) == tokens
    assert set(prompt[:512]) == {7}
    assert set(prompt[512:1024]) <= {8}
