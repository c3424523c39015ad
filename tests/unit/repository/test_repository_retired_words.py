"""Retired identifiers, words and calls do not return."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.repository import ROOT

SUFFIXES = {".css", ".html", ".js", ".lua", ".md", ".py", ".sh", ".toml", ".yaml"}
IDENTIFIERS = """
Switchboard LiveStream TokenPath TextReplicas SilentWorkers Wanted Placed BEHIND Directions NOWHERE stages_direct
stages_engine hooks_text OwnTextLink Said StopRules Tokenized Fleet Parity Catalogue Straight PlainSends
DirectSender Pacer GuardedProtocol _Ears Conductor Teller Place Spelling respell Remark Annotator Wishes forced_calls
_Rank turnstile UsualTime CallStream CallSession Learned tls_refusal Book Bookkeeper Keeper ModelView overtaken
Holding Shelf AnyOne Workforce dialogue Decider Pick Terms Cast Standing Siblings _Stretch Drift FollowUps Pins
Delivery Hosted Meeting Flight Flights Seat last_words stand_ins Lagging TextDesk Columns Follower CacheLog Opener
SpaceGate computed_unsaid worker_has_it_not cut_off sluice_gateway_calls_in_trouble Vouched
"""
_IDENTIFIER = re.compile(rf"\b(?:{'|'.join(IDENTIFIERS.split())})\b")
_WORD = re.compile(r"\b(?:who(?:ever)|(?:no|some)(?:body))\b", re.IGNORECASE)

_WAIT = re.compile(r"\basyncio\.wait_for\(")
"""Swallows a cancellation that arrives together with the result, before Python 3.12; `asyncio.timeout` does not."""
_BOUND = re.compile(r"\b_?(?:MOST|LONGEST|LEAST|FEWEST)_[A-Z]")


def texts(*names: str) -> Iterator[Path]:
    for name in names:
        path = ROOT / name
        files = [path] if path.is_file() else sorted(path.rglob("*"))
        yield from (file for file in files if file.suffix in SUFFIXES and "node_modules" not in file.parts)


@pytest.mark.parametrize(
    ("pattern", "places"),
    [
        pytest.param(_IDENTIFIER, "services sluice clients examples docs README.md", id="identifiers"),
        pytest.param(_WAIT, "services sluice clients/python/src", id="wait_for"),
        pytest.param(_BOUND, "services sluice clients tests benchmarks examples scripts", id="bounds"),
        pytest.param(_WORD, "services sluice clients docs README.md protos tests benchmarks examples", id="words"),
    ],
)
def test_retired_names_in_the_repository_are_absent(pattern: re.Pattern[str], places: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {match.group()}"
        for path in texts(*places.split())
        for number, line in enumerate(path.read_text().splitlines(), 1)
        for match in pattern.finditer(line)
    ]
    assert not found, "\n".join(found)
