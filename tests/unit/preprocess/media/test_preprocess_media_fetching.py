"""Fetching from hosts that are slow, endless, redirect, or lead to private addresses."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence

import pytest

from services.common.base.errors import ErrorKind, SluiceError
from services.gateway.settings import GatewaySettings
from services.preprocess.media.addresses import AllowedHosts, PublicAddresses
from services.preprocess.media.fetching import FetchLimits, MediaFetcher
from services.preprocess.media.https_get import AddressPolicy, HttpsGet, resolve
from services.preprocess.media.limits import CheckLimits
from services.preprocess.settings import PreprocessSettings
from tests.support.servers.media_host import MediaHost, media_host, response
from tests.support.waiting import until

PART = "messages[2].content[1]"
MOST = 100_000


class LoopbackToo(PublicAddresses):
    """Permits 127.0.0.1 as well, for the server of these tests."""

    def permits(self, address: str) -> bool:
        return address == "127.0.0.1" or super().permits(address)


class Names:
    """Resolves names to what the test sets, in turns."""

    def __init__(self, *answers: Sequence[str]) -> None:
        self.answers = list(answers) or [["127.0.0.1"]]
        self.asked: list[str] = []

    async def __call__(self, host: str, port: int) -> list[str]:
        self.asked.append(host)
        return list(self.answers.pop(0) if len(self.answers) > 1 else self.answers[0])


@pytest.fixture
async def host() -> AsyncIterator[MediaHost]:
    async with media_host() as host:
        yield host


def fetcher(
    host: MediaHost,
    policy: AddressPolicy | None = None,
    names: Names | None = None,
    hosts: Sequence[str] = (),
    limits: FetchLimits | None = None,
    read_s: float = 5.0,
) -> MediaFetcher:
    get = HttpsGet(policy or LoopbackToo(), MOST, read_s, host.tls, names or Names())
    listed = [*hosts] or [f"media.test:{host.port}"]
    return MediaFetcher(AllowedHosts(listed), get, limits or FetchLimits(MOST, total_s=20.0))


def url(host: MediaHost, path: str = "/a.png", name: str = "media.test") -> str:
    return f"https://{name}:{host.port}{path}"


async def refusal(fetcher: MediaFetcher, url: str) -> SluiceError:
    with pytest.raises(SluiceError) as caught:
        await fetcher.fetch(url, PART)
    assert caught.value.param == PART
    assert PART in caught.value.message
    return caught.value


async def test_fetcher_listed_host_returns_the_file_without_cookies_or_compression(host: MediaHost) -> None:
    host.answers["/a.png?x=1"] = response(b"file", "200 OK", "Set-Cookie: a=b")
    found = fetcher(host)
    for _ in range(2):
        assert await found.fetch(url(host, "/a.png?x=1"), PART) == b"file"
    assert found.counts.results == {"fetched": 2}
    head = host.requests[1].lower()
    assert f"host: media.test:{host.port}\r\n" in head
    assert "accept-encoding: identity" in head
    assert "cookie" not in head
    assert "referer" not in head


async def test_fetcher_without_hosts_names_the_setting(host: MediaHost) -> None:
    found = MediaFetcher(AllowedHosts([]), HttpsGet(LoopbackToo(), MOST, 5.0, host.tls, Names()), FetchLimits())
    error = await refusal(found, url(host))
    assert error.code == "media_fetch_refused"
    assert "--media-hosts" in error.message
    assert host.requests == []


async def test_fetcher_unlisted_host_is_not_resolved(host: MediaHost) -> None:
    names = Names()
    error = await refusal(fetcher(host, names=names), url(host, name="other.test"))
    assert error.code == "media_fetch_refused"
    assert names.asked == []


@pytest.mark.parametrize(
    "location",
    ["https://evil.test/", "http://media.test/b", "file:///etc/passwd", "//evil.test/", "https://u:p@media.test/"],
)
async def test_fetcher_redirect_off_the_list_is_refused(host: MediaHost, location: str) -> None:
    host.answers["/a.png"] = response(b"", "301 Moved", f"Location: {location}")
    error = await refusal(fetcher(host), url(host))
    assert error.code == "media_fetch_refused"
    assert len(host.requests) == 1


@pytest.mark.parametrize("location", ["https://[bad/", "//[bad/", "https://media.test:99999/", "https://[v1.x]/"])
async def test_fetcher_redirect_to_what_is_not_a_url_is_refused(host: MediaHost, location: str) -> None:
    host.answers["/a.png"] = response(b"", "302 Found", f"Location: {location}")
    error = await refusal(fetcher(host), url(host))
    assert (error.kind, error.code) == (ErrorKind.INVALID_ARGUMENT, "media_fetch_refused")


async def test_fetcher_few_redirects_are_followed_and_many_refused(host: MediaHost) -> None:
    for index in range(5):
        host.answers[f"/{index}"] = response(b"", "302 Found", f"Location: /{index + 1}")
    host.answers["/5"] = response(b"file")
    assert await fetcher(host).fetch(url(host, "/2"), PART) == b"file"
    error = await refusal(fetcher(host), url(host, "/0"))
    assert error.code == "media_fetch_refused"
    assert "more than 3 times" in error.message


async def test_fetcher_announced_size_over_the_limit_is_refused_before_the_file(host: MediaHost) -> None:
    async def announce(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 10000000000\r\n\r\n")
        await asyncio.sleep(30)

    host.answers["/a.png"] = announce
    error = await refusal(fetcher(host, read_s=25.0), url(host))
    assert (error.kind, error.code) == (ErrorKind.TOO_LARGE, "media_too_large")


async def test_fetcher_endless_file_is_refused_at_the_limit(host: MediaHost) -> None:
    sent = 0

    async def endless(writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        while True:
            writer.write(b"4000\r\n" + bytes(0x4000) + b"\r\n")
            sent += 0x4000
            await writer.drain()

    host.answers["/a.png"] = endless
    assert (await refusal(fetcher(host), url(host))).code == "media_too_large"
    assert sent < MOST + (8 << 20)  # what sockets buffer


@pytest.mark.parametrize(
    ("head", "piece"),
    [("200 OK\r\nTransfer-Encoding: chunked", b"1\r\na\r\n"), ("100 Continue", b"HTTP/1.1 100 Continue\r\n\r\n")],
)
async def test_fetcher_file_in_tiny_pieces_fails_after_few_of_them(host: MediaHost, head: str, piece: bytes) -> None:
    async def send(writer: asyncio.StreamWriter) -> None:
        writer.write(f"HTTP/1.1 {head}\r\n\r\n".encode())
        while True:
            writer.write(piece * 1000)
            await writer.drain()

    host.answers["/a.png"] = send
    error = await refusal(fetcher(host), url(host))
    assert error.code == "media_fetch_failed"
    assert "too small" in error.message


async def test_fetcher_file_in_small_pieces_is_fetched(host: MediaHost) -> None:
    async def send(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"40\r\n%b\r\n" % bytes(64) * 1000)
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    host.answers["/a.png"] = send
    assert await fetcher(host).fetch(url(host), PART) == bytes(64_000)


async def test_resolver_that_waits_for_name_servers_leaves_the_threads_of_requests_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answered = threading.Event()
    monkeypatch.setattr("socket.getaddrinfo", lambda *args, **kwargs: answered.wait(60) and [])
    waiting = [asyncio.ensure_future(resolve(f"{index}.test", 443)) for index in range(64)]
    try:
        await asyncio.sleep(0)
        async with asyncio.timeout(20):
            assert await asyncio.to_thread(lambda: "free") == "free"
    finally:
        answered.set()
        assert await asyncio.gather(*waiting) == [[]] * 64


async def test_fetcher_endless_head_fails(host: MediaHost) -> None:
    async def endless(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n")
        while True:
            writer.write(b"X: " + b"a" * 1000 + b"\r\n")
            await writer.drain()

    host.answers["/a.png"] = endless
    assert (await refusal(fetcher(host), url(host))).code == "media_fetch_failed"


async def test_fetcher_slow_host_fails_after_the_read_limit(host: MediaHost) -> None:
    async def silent(writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(60)

    host.answers["/a.png"] = silent
    error = await refusal(fetcher(host, read_s=0.5), url(host))
    assert (error.kind, error.code) == (ErrorKind.INVALID_ARGUMENT, "media_fetch_failed")


async def test_fetcher_host_that_sends_byte_by_byte_fails_after_the_total_limit(host: MediaHost) -> None:
    async def drip(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 50000\r\n\r\n")
        while True:
            writer.write(b"a")
            await writer.drain()
            await asyncio.sleep(0.05)

    host.answers["/a.png"] = drip
    found = fetcher(host, limits=FetchLimits(MOST, total_s=1.0))
    assert (await refusal(found, url(host))).code == "media_fetch_failed"


def test_limits_of_fetching_and_checking_end_before_the_gateway_gives_up() -> None:
    fetch_s = PreprocessSettings.model_fields["media_fetch_s"].default
    assert fetch_s == FetchLimits().total_s
    assert fetch_s + CheckLimits().limit_s < GatewaySettings.model_fields["tokenize_timeout_s"].default


async def test_fetcher_gone_cut_off_or_compressed_file_fails(host: MediaHost) -> None:
    async def cut(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\nabc")

    host.answers["/cut"] = cut
    host.answers["/zip"] = response(b"x", "200 OK", "Content-Encoding: gzip")
    for path in ("/gone", "/cut", "/zip"):
        error = await refusal(fetcher(host), url(host, path))
        assert error.code == "media_fetch_failed"


async def test_fetcher_untrusted_certificate_fails(host: MediaHost) -> None:
    get = HttpsGet(LoopbackToo(), MOST, 5.0, None, Names())
    found = MediaFetcher(AllowedHosts([f"media.test:{host.port}"]), get, FetchLimits())
    error = await refusal(found, url(host))
    assert error.code == "media_fetch_failed"
    assert "certificate" in error.message


def held(host: MediaHost) -> asyncio.Event:
    """Makes the host answer /a.png after the event that is returned."""
    release = asyncio.Event()

    async def answer(writer: asyncio.StreamWriter) -> None:
        await release.wait()
        await response(b"file")(writer)

    host.answers["/a.png"] = answer
    return release


async def test_fetcher_concurrent_requests_share_a_fetch_and_later_ones_fetch_again(host: MediaHost) -> None:
    release = held(host)
    found = fetcher(host)
    waiting = [asyncio.ensure_future(found.fetch(url(host), PART)) for _ in range(5)]
    await until(lambda: bool(host.requests))
    waiting.pop().cancel()
    release.set()
    assert await asyncio.gather(*waiting) == [b"file"] * 4
    assert len(host.requests) == 1
    host.answers["/a.png"] = response(b"another")
    assert await found.fetch(url(host), PART) == b"another"


async def test_fetcher_last_request_cancelled_ends_the_fetch(host: MediaHost) -> None:
    async def silent(writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(60)

    host.answers["/a.png"] = silent
    found = fetcher(host)
    task = asyncio.ensure_future(found.fetch(url(host), PART))
    await until(lambda: bool(host.requests))
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await until(lambda: not found._tasks.alive)


async def test_fetcher_with_too_many_fetches_refuses_more(host: MediaHost) -> None:
    async def silent(writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(60)

    found = fetcher(host, limits=FetchLimits(MOST, at_once=1, waiting=1))
    for index in range(3):
        host.answers[f"/{index}"] = silent
    tasks = [asyncio.ensure_future(found.fetch(url(host, f"/{index}"), PART)) for index in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(SluiceError) as caught:
        await found.fetch(url(host, "/2"), PART)
    assert caught.value.kind is ErrorKind.OVERLOADED
    await found.close()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_fetcher_file_that_waits_for_others_too_long_is_overload_and_no_fault_of_its_url(host: MediaHost) -> None:
    async def silent(writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(60)

    host.answers.update({"/0": silent, "/1": silent})
    found = fetcher(host, limits=FetchLimits(MOST, total_s=1.0, at_once=1))
    first, second = (asyncio.ensure_future(found.fetch(url(host, f"/{index}"), PART)) for index in range(2))
    failed, waited = await asyncio.gather(first, second, return_exceptions=True)
    assert isinstance(failed, SluiceError)
    assert isinstance(waited, SluiceError)
    assert (failed.kind, failed.code) == (ErrorKind.INVALID_ARGUMENT, "media_fetch_failed")
    assert waited.kind is ErrorKind.OVERLOADED
    assert found.counts.results == {"media_fetch_failed": 1, "overloaded": 1}


async def test_fetcher_file_that_begins_just_before_its_deadline_is_overload(host: MediaHost) -> None:
    async def late(writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.7)
        await response(b"file")(writer)

    async def silent(writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(60)

    host.answers.update({"/0": late, "/1": silent})
    found = fetcher(host, limits=FetchLimits(MOST, total_s=1.0, at_once=1))
    first, second = (asyncio.ensure_future(found.fetch(url(host, f"/{index}"), PART)) for index in range(2))
    _, waited = await asyncio.gather(first, second, return_exceptions=True)
    assert isinstance(waited, SluiceError)
    assert waited.kind is ErrorKind.OVERLOADED


async def test_fetcher_fetch_that_ends_late_leaves_a_new_one_of_its_url_to_others(host: MediaHost) -> None:
    release = held(host)
    found = fetcher(host)
    cancelled = asyncio.ensure_future(found.fetch(url(host), PART))
    await until(lambda: bool(host.requests))
    cancelled.cancel()
    await asyncio.sleep(0)  # its fetch is cancelled, and has not ended yet
    waiting = [asyncio.ensure_future(found.fetch(url(host), PART))]
    await until(lambda: len(host.requests) == 2)
    waiting.append(asyncio.ensure_future(found.fetch(url(host), PART)))
    await asyncio.sleep(0)
    release.set()
    assert await asyncio.gather(*waiting) == [b"file"] * 2
    assert len(host.requests) == 2
