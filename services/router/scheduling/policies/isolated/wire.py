"""Messages between the router and the process of its stages: JSON, checked where they come from foreign code."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, fields
from operator import attrgetter
from types import MappingProxyType
from typing import Any

from services.router.scheduling.policies.composition import Composition, Ranking, StageConfig
from services.router.scheduling.policies.contract import Candidate, PolicyRequest

_REQUEST = attrgetter(*(each.name for each in fields(PolicyRequest) if each.name != "headers"))
_CANDIDATE = attrgetter(*(each.name for each in fields(Candidate)))


def pack_compositions(compositions: Sequence[Composition]) -> bytes:
    """Returns the message that starts the process."""
    return _dump([asdict(composition) for composition in compositions])


def unpack_compositions(message: bytes) -> list[Composition]:
    """Reverses `pack_compositions`."""
    return [
        Composition(
            each["name"],
            tuple(StageConfig(**stage) for stage in each["filters"]),
            tuple(StageConfig(**stage) for stage in each["scorers"]),
            StageConfig(**each["picker"]),
            each["cost"],
        )
        for each in json.loads(message)
    ]


def pack_call(policy: str, request: PolicyRequest, candidates: Sequence[Candidate]) -> bytes:
    """Returns the message of a call."""
    return _dump([policy, [*_REQUEST(request), dict(request.headers)], [*map(_CANDIDATE, candidates)]])


def unpack_call(message: bytes) -> tuple[str, PolicyRequest, list[Candidate]]:
    """Reverses `pack_call`."""
    policy, request, candidates = json.loads(message)
    found = [Candidate(*map(_immutable, values)) for values in candidates]
    return policy, PolicyRequest(*map(_immutable, request)), found


def _immutable(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(value)
    return MappingProxyType(value) if isinstance(value, dict) else value


def pack_ranking(ranking: Ranking) -> bytes:
    """Returns the reply with a ranking."""
    return _dump([ranking.kept, ranking.scores, ranking.groups])


def pack_failure(message: str) -> bytes:
    """Returns the reply to a call that failed."""
    return _dump(message)


def unpack_reply(message: bytes, candidates: int) -> Ranking | str:
    """Returns the ranking, or the reason why there is none.

    Raises:
        ValueError: the reply is neither; the process does not follow the protocol.
    """
    reply = json.loads(message)
    if isinstance(reply, str):
        return reply
    try:
        kept, scores, groups = reply
        flat = [at for group in groups for at in group]
        valid = (
            len(kept) == len(scores) == len(set(kept))
            and len(set(flat)) == len(flat)
            and {*flat} <= {*kept}
            and all(type(at) is int and 0 <= at < candidates for at in kept)
            and all(isinstance(score, float) and 0 <= score <= 1 for score in scores)
            and bool(flat) == bool(kept)
        )
    except TypeError:
        valid = False
    if not valid:
        raise ValueError("not a ranking")
    return Ranking(kept, scores, groups)


def _dump(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
