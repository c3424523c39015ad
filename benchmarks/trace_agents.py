"""Generates requests of agents: long system prompts that many sessions share, and turns that extend their session."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from itertools import count
from random import Random

from trace_fleet import TOKENS_PER_ID, Arrival

AGENTS = 40
"""Agents with a system prompt of their own; the n-th is 1/n as popular as the first."""
SYSTEM_PROMPT_TOKENS = (4_096, 32_768)
"""Shortest and longest system prompt with its tools; uniform in between, whole ids."""
SESSIONS_PER_S = 0.5
"""Sessions that begin a second, at random times."""
TURNS = 8
"""Mean number of requests of a session, geometric."""
REWRITING_TURNS = 30
"""Requests of a session whose prompts are rewritten."""
TOOL_S, USER_S, USER_SHARE = 4.0, 60.0, 0.25
"""Mean pause between two turns while a tool runs, while a user reads, and how many of the pauses are a user's."""
ADDED_TOKENS = (700, 1.0)
"""Median and sigma of the tokens that a turn adds to the answer before it, log-normal."""
OUTPUT_TOKENS = (150, 0.9)
"""Median and sigma of an answer's tokens, log-normal."""
MAX_TOKENS = 120_000
"""A session ends when its prompt would be longer."""


@dataclass(slots=True)
class _Session:
    number: int
    agent: int
    ids: list[int]
    tokens: int
    """Length of its next prompt."""
    system_ids: int
    turns_left: int

    def rewrite(self, random: Random, new: int) -> None:
        """Replaces one block in the second half of what follows the system prompt."""
        first = (self.system_ids + len(self.ids)) // 2
        if first < len(self.ids):
            self.ids[random.randrange(first, len(self.ids))] = new


def agent_arrivals(requests: int, seed: int, rewritten: bool = False) -> list[Arrival]:
    """Returns the first `requests` requests, in order of arrival; equal seeds give equal requests.

    Four requests a second on average, with 29,000 prompt tokens, of which 95 % repeat a prefix of an earlier request.

    Args:
        rewritten: sessions have 30 turns, and every turn has another block at a random place in the second half of what
            follows the system prompt, as when an agent shortens the results of its tools.
    """
    turns_left = REWRITING_TURNS if rewritten else 0
    random, fresh, order = Random(seed), count(), count()
    prompts = [
        [next(fresh) for _ in range(random.randint(*SYSTEM_PROMPT_TOKENS) // TOKENS_PER_ID)] for _ in range(AGENTS)
    ]
    popularity = [1 / rank for rank in range(1, AGENTS + 1)]
    arrivals: list[Arrival] = []
    turns: list[tuple[float, int, _Session]] = []
    begins_s = 0.0
    while len(arrivals) < requests:
        if not turns or begins_s <= turns[0][0]:
            agent = random.choices(range(AGENTS), popularity)[0]
            ids = list(prompts[agent])
            number = next(order)
            first_tokens = len(ids) * TOKENS_PER_ID + _tokens(random, ADDED_TOKENS)
            session = _Session(number, agent, ids, first_tokens, len(ids), turns_left)
            heapq.heappush(turns, (begins_s, number, session))
            begins_s += random.expovariate(SESSIONS_PER_S)
            continue
        now_s, _, session = heapq.heappop(turns)
        if rewritten:
            session.rewrite(random, next(fresh))
        session.ids.extend(next(fresh) for _ in range(-(-session.tokens // TOKENS_PER_ID) - len(session.ids)))
        output = _tokens(random, OUTPUT_TOKENS)
        arrivals.append(
            Arrival(now_s, session.tokens, output, tuple(session.ids), session=session.number, agent=session.agent)
        )
        session.tokens += output + _tokens(random, ADDED_TOKENS)
        session.turns_left -= 1
        goes_on = session.turns_left > 0 if rewritten else random.random() >= 1 / TURNS
        if goes_on and session.tokens <= MAX_TOKENS:
            pause_s = random.expovariate(1 / (USER_S if random.random() < USER_SHARE else TOOL_S))
            heapq.heappush(turns, (now_s + pause_s, next(order), session))
    return arrivals


def _tokens(random: Random, spread: tuple[float, float]) -> int:
    median, sigma = spread
    return max(int(median * random.lognormvariate(0, sigma)), 1)
