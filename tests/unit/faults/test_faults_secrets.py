"""Certificates that expire and tokens that are rotated: what processes are given, and in which order."""

from __future__ import annotations

import asyncio
import ssl
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from services.common.security.tls import refusal
from services.common.settings.service import TlsSettings
from tests.support.faults import injections_secrets
from tests.support.faults.credentials import Credentials
from tests.support.faults.fault import Scene
from tests.support.faults.parts import PARTS

NAMES = ["preprocess", "router", "router-1", "worker-0", "gateway"]


@pytest.fixture
def credentials(tmp_path: Path) -> Credentials:
    return Credentials(tmp_path, ["10.77.0.2"])


def content(flags: tuple[str, ...], flag: str) -> str:
    return Path(flags[flags.index(flag) + 1]).read_text()


def reason(trust: TlsSettings) -> str:
    """Why peers reject a certificate."""
    assert trust.tls_cert is not None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(trust.tls_cert, trust.tls_key)
    return refusal(context, trust.tls_cert)


def test_certificate_that_has_expired_is_of_one_process_and_is_renewed(credentials: Credentials) -> None:
    other = credentials.issue("worker-1")
    expired = credentials.issue("worker-0", timedelta(seconds=-1))
    assert "expired" in reason(expired)
    assert reason(other) == ""
    assert credentials.issue("worker-0") == expired
    assert reason(expired) == ""


def test_flags_of_a_process_name_files_of_its_own(credentials: Credentials) -> None:
    router, other, gateway = (credentials.flags(name) for name in ("router", "router-1", "gateway"))
    assert content(router, "--tls-cert") != content(other, "--tls-cert")
    assert content(router, "--tls-ca") == content(gateway, "--tls-ca")
    assert content(router, "--tokens-file") == content(other, "--tokens-file")
    assert content(gateway, "--https-cert") == content(gateway, "--tls-cert")
    assert "--tokens-file" not in gateway


def test_tokens_that_are_rotated_reach_only_the_processes_that_are_given_them(credentials: Credentials) -> None:
    router, other = credentials.flags("router"), credentials.flags("router-1")
    before = content(router, "--tokens-file")
    credentials.rotate("prepare")
    assert content(router, "--tokens-file") == before
    credentials.give(["router"])
    assert set(content(router, "--tokens-file").split()) > set(before.split())
    assert content(other, "--tokens-file") == before


async def test_rotation_takes_every_step_and_gives_the_part_its_files_last(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Any] = []

    async def no_wait(_: float) -> None:
        return None

    async def whole() -> None:
        done.append("whole")

    monkeypatch.setattr(asyncio, "sleep", no_wait)
    credentials = SimpleNamespace(rotate=done.append, give=done.append)
    place = SimpleNamespace(credentials=credentials, suite=SimpleNamespace(names=NAMES), whole=whole)
    await injections_secrets.tokens_rotated(Scene(place, PARTS["router"]))  # type: ignore[arg-type]
    others, own = ["operator", "preprocess", "worker-0", "gateway"], ["router", "router-1"]
    given = [others, own]
    assert done == ["prepare", *given, "switch", *given, "finish", *given, "whole"]
