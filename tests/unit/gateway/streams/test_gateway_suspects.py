"""Which deaths of workers a request is suspected of, and for how long that is remembered."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from services.common.base.errors import ErrorKind, SluiceError
from services.gateway.core.request import GenerationRequest
from services.gateway.streams.suspects import Suspects
from tests.support.servers.survival import asking

LOST = SluiceError(ErrorKind.DISCONNECTED, "The connection was lost.")


class Stream(SimpleNamespace):
    """What Suspects reads of a GenerationStream."""

    __hash__ = object.__hash__  # type: ignore[assignment]


def stream_of(request: GenerationRequest) -> Any:
    sent = SimpleNamespace(reasoning=0, calls={})
    return Stream(request=request, tokens=[], text_sent=0, sent=sent, slot=1, worker=None)


def link(worker_id: str, session: int = 1) -> Any:
    return SimpleNamespace(worker_id=worker_id, sessions=session, unsent=set())


def test_deaths_of_all_choices_of_a_request_count_once_each() -> None:
    suspects, request = Suspects(), asking("a", "hi")
    first, second = stream_of(request), stream_of(request)
    assert suspects.record(first, link("w0"), LOST, list) == 1
    assert suspects.record(second, link("w0"), LOST, list) == 1
    assert suspects.record(second, link("w1"), LOST, list) == 2
    assert suspects.deaths(first) == 2


def test_deaths_of_another_request_with_the_same_id_do_not_count() -> None:
    suspects, before, after = Suspects(), asking("a", "hi"), asking("a", "hi")
    suspects.record(stream_of(before), link("w0"), LOST, list)
    assert suspects.record(stream_of(after), link("w1"), LOST, list) == 1


def test_suspect_is_not_placed_beside_the_other_choices_of_a_request_but_with_its_own() -> None:
    """A choice that runs elsewhere may end its worker too: its request must not be the death of a third one."""
    suspects, poison = Suspects(), asking("a", "hi")
    lost, running, innocent = stream_of(poison), stream_of(poison), stream_of(asking("b", "hi"))
    running.worker = link("w1")
    workers = ["w0", "w1", "w2", "w3"]
    suspects.record(innocent, link("w0"), LOST, lambda: [innocent])
    suspects.record(lost, link("w0"), LOST, lambda: [lost, running])
    assert suspects.workers_to_avoid(lost, workers, separate=True) == ["w0", "w2", "w3"]
    assert suspects.workers_to_avoid(innocent, workers, separate=True) == ["w1"]
    running.tokens.append(7)
    assert suspects.workers_to_avoid(innocent, workers, separate=True) == []


def test_deaths_are_forgotten_with_their_request() -> None:
    suspects = Suspects()
    for number in range(100):
        stream = stream_of(asking(f"a-{number}", "hi" * 1_000))
        suspects.record(stream, link("w0"), LOST, list)
        suspects.start(stream)
        del stream
    assert not suspects._deaths
    assert not suspects._running
