"""The Redis URLs that settings take."""

from __future__ import annotations

import pytest

from services.common.base.errors import SluiceError
from services.common.redis.target import Credentials, RedisTarget, Topology, parse
from tests.support.oracles.errors import raises_error

HERE = (("127.0.0.1", 6379),)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://", RedisTarget(Topology.STANDALONE, HERE)),
        ("redis://localhost:7000/2", RedisTarget(Topology.STANDALONE, (("localhost", 7000),), db=2)),
        ("valkey://host", RedisTarget(Topology.STANDALONE, (("host", 6379),))),
        ("rediss://[::1]:7000", RedisTarget(Topology.STANDALONE, (("::1", 7000),), tls=True)),
        ("unix:///run/redis.sock", RedisTarget(Topology.STANDALONE, path="/run/redis.sock")),
        (
            "redis+sentinel://a,b:7000/mine/4",
            RedisTarget(Topology.SENTINEL, (("a", 26379), ("b", 7000)), service="mine", db=4),
        ),
        ("rediss+cluster://a:1,b:2", RedisTarget(Topology.CLUSTER, (("a", 1), ("b", 2)), tls=True)),
    ],
)
def test_urls(url: str, expected: RedisTarget) -> None:
    assert parse(url) == expected


def test_passwords_come_from_the_url_or_from_elsewhere() -> None:
    target = parse("redis+sentinel://me:p%40ss@a/mine?sentinel_password=s", Credentials("other"))
    assert (target.username, target.credentials) == ("me", Credentials("p@ss", "s"))
    assert parse("redis://a", Credentials("other", "s")).credentials == Credentials("other", "s")
    assert "p@ss" not in repr(target)


@pytest.mark.parametrize(
    "url",
    [
        "http://host",
        "host:6379",
        "redis+ring://host",
        "unix+cluster:///x",
        "redis://a:secret@host:port",
        "redis://a,b",
        "redis://host/zero",
        "redis://host/-1",
        "redis://host/0/1",
        "redis://host?timeout=1",
        "redis+sentinel://host",
        "redis+cluster://host/1",
    ],
)
def test_what_is_no_redis_url_is_refused_in_a_sentence(url: str) -> None:
    with pytest.raises(SluiceError, match=r"redis-url is not a Redis URL: .*redis\+sentinel") as refused:
        parse(url)
    assert "secret" not in refused.value.message


def test_the_sentence_names_the_setting() -> None:
    with raises_error(match=r"limits-redis-url is not a Redis URL: .*redis\+sentinel", param="limits-redis-url"):
        parse("http://host", None, "limits-redis-url")
