"""Why a cell cannot be perfect by nature: the only place that excuses one."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from tests.support.faults.leftovers import Left
from tests.support.faults.outcome import Cell

RETRIED = "retried"
"""In place of an error: attempts that were cut with their server and succeeded at another one."""


@dataclass(frozen=True, slots=True)
class Sentence:
    """An excuse, which holds only for errors that match.

    Attributes:
        parts, faults, loads: of the cells; empty: all.
        errors: pattern of every excused error, or RETRIED.
    """

    text: str
    errors: str
    parts: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()
    loads: tuple[str, ...] = ()

    def concerns(self, cell: Cell) -> bool:
        """Whether a cell is one of those that the sentence is about."""
        wanted = ((self.parts, cell.part), (self.faults, cell.fault), (self.loads, cell.load))
        return all(not names or name in names for names, name in wanted)


_ENDING = ("sigkill", "sigterm", "oom", "rolling-restart", "rolling-upgrade")
_SILENCING = ("sigstop-60s", "partition", "one-way-partition")
_REPLACED = ("sigstop-5s", *_SILENCING)

SENTENCES = (
    Sentence(
        "A gateway's own connections end with it or are cut, and one that is cut off answers 503; a client that asks "
        "the other gateway is answered.",
        RETRIED,
        parts=("gateway",),
    ),
    Sentence(
        "A router's own callers are cut with it; a scheduler or an Envoy that asks the other router is answered.",
        RETRIED,
        parts=("router", "picker"),
    ),
    Sentence(
        "A reservation is of a worker's room: it ends with the worker, and the scheduler learns it when it frees it.",
        "the reservation was lost: .* on (worker|prefill)-",
        parts=("worker", "decode-worker", "prefill-worker"),
        faults=(*_ENDING, *_SILENCING),
        loads=("route",),
    ),
    Sentence(
        "Only the gateway that runs a background response can end it; the other one reports it as failed once the "
        "lease of 30 s has expired.",
        "response failed|hung",
        parts=("gateway",),
        faults=(*_ENDING, *_SILENCING, "certificate-expired"),
        loads=("background",),
    ),
    Sentence(
        "Batches, files and background responses are in Redis and nowhere else: while it is away, requests for them "
        "are answered with 503 `store_unavailable`; a client that asks again is served.",
        RETRIED,
        parts=("redis", "redis-sentinel", "redis-cluster"),
        loads=("batch", "background"),
    ),
    Sentence(
        "Batches, files and background responses are in Redis and nowhere else: what is asked while it stands still "
        "for longer than a client waits is not answered.",
        "hung",
        parts=("redis",),
        faults=("sigstop-60s",),
        loads=("batch", "background"),
    ),
    Sentence(
        "Sentinel makes a replica master before it tells the old one to stop: what the old one acknowledges in between "
        "is lost, which Redis does not prevent. A master that is ended with SIGTERM waits for its replicas instead.",
        r"/v1/(files|batches|responses).*: 404",
        parts=("redis-sentinel",),
        faults=("failover",),
        loads=("batch", "background"),
    ),
    Sentence(
        "A master that stood still or was cut off, and was replaced meanwhile, acknowledges what it is sent until it "
        "learns of it; that is lost, which Redis does not prevent.",
        r"/v1/(files|batches|responses).*: 404",
        parts=("redis-sentinel", "redis-cluster"),
        faults=_REPLACED,
        loads=("batch", "background"),
    ),
    Sentence(
        "FLUSHALL deletes stored responses, files and batches: those in progress are gone.",
        r"/v1/(files|batches|responses).*: 404|response failed|batch failed",
        parts=("redis", "redis-sentinel", "redis-cluster"),
        faults=("flushall",),
        loads=("batch", "background"),
    ),
    Sentence(
        "FLUSHALL deletes the reservations of all routers: those made before it are unknown when they are freed.",
        r"request \d+, -\S+ s: .*the reservation was lost: ",
        parts=("redis", "redis-sentinel", "redis-cluster"),
        faults=("flushall",),
        loads=("route",),
    ),
)

LEFT_SENTENCES = (
    Sentence(
        "A gateway that goes on answers what it was asked while it stood still: a response, file or batch of a client "
        "that has asked the other gateway meanwhile is left, until it expires.",
        r"\{sluice:(responses|batches)\}:",
        parts=("gateway",),
        faults=("sigstop-60s",),
    ),
    Sentence(
        "A response, file or batch of a client that stopped waiting for a Redis that stands still is left, until it "
        "expires.",
        r"\{sluice:(responses|batches)\}:",
        parts=("redis",),
        faults=("sigstop-60s",),
    ),
    Sentence(
        "What belonged to a record that a fail-over of Redis lost is left, until it expires.",
        r"\{sluice:(responses|batches)\}:",
        parts=("redis-sentinel", "redis-cluster"),
        faults=("failover", *_REPLACED),
    ),
)
"""Excuse what is left of a row: keys, all of which match."""


def excuse(cell: Cell) -> str:
    """Returns the sentences of a cell that is not perfect, or whose clients asked again.

    Nothing: it needs none, or something happened that none excuses.
    """
    about = [sentence for sentence in SENTENCES if sentence.concerns(cell)]
    texts = [sentence.text for sentence in about if sentence.errors == RETRIED and cell.retried]
    if cell.perfect:
        return " ".join(texts)
    if cell.full_service_s is None or not cell.requests or len(cell.errors) < cell.failed + cell.different:
        return ""
    for error in cell.errors:
        matching = [each.text for each in about if each.errors != RETRIED and re.search(each.errors, error)]
        if not matching:
            return ""
        texts += [text for text in matching if text not in texts]
    return " ".join(texts)


def excuse_left(part: str, fault: str, left: Left) -> str:
    """Returns the sentence about what a fault left; nothing: there is none, or something is left that none excuses."""
    if left.nothing or not replace(left, keys=None).nothing:
        return ""
    about = [sentence for sentence in LEFT_SENTENCES if sentence.concerns(Cell(part, fault, ""))]
    kinds = left.keys or {}
    matching = (sentence.text for sentence in about if all(re.match(sentence.errors, kind) for kind in kinds))
    return next(matching, "")
