"""Hostile image URLs and files through the whole suite: each is a 4xx that names its part, and nothing else happens."""

from __future__ import annotations

import asyncio
import base64
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.support.clients.image_parts import data_url, described, image_url, picture, user_message
from tests.support.data.images import gif_of_frames, image_file, jpeg_of_scans, png_bomb, png_declaring
from tests.support.data.tiny_vlm import build_qwen2_vl
from tests.support.servers.loose_suite import LooseSuite
from tests.support.servers.media_host import MediaHost, media_host, response
from tests.support.servers.scripted_names import EXEMPT, SCRIPTED_NAMES, write_script

PART = "messages[2].content[1]"
REFUSED, FAILED, INVALID, TOO_LARGE = "media_fetch_refused", "media_fetch_failed", "invalid_media", "media_too_large"
RED, BLUE = (255, 0, 0), (0, 0, 255)
FILE_MB = 4
MAX_GROWTH_MIB = 160
"""Growth of preprocess: some files in flight, of FILE_MB each, and their base64 text."""
MAX_CHILD_MIB = 400
"""Peak of a process that decodes: 40 million pixels of four bytes, and Python."""
SIDE = 6_300
DECODED_MIB = 3 * SIDE * SIDE / (1 << 20)
LIMITS = {
    "SLUICE_PREPROCESS_MEDIA_MB": str(FILE_MB),
    "SLUICE_PREPROCESS_MEDIA_FETCH_S": "2",
}


@dataclass
class Peaks:
    """The most memory that preprocess and the processes below it had, MiB, by process id."""

    pid: int
    before: float = 0.0
    found: dict[int, float] = field(default_factory=dict)

    def measure(self) -> None:
        """Reads the peaks that the kernel records."""
        with suppress(psutil.Error):
            for process in (psutil.Process(self.pid), *psutil.Process(self.pid).children(recursive=True)):
                with suppress(OSError, StopIteration):
                    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
                    line = next(line for line in lines if line.startswith("VmHWM:"))
                    self.found[process.pid] = max(self.found.get(process.pid, 0.0), int(line.split()[1]) / 1024)


@dataclass
class Attacked:
    """The suite, the host from which it may fetch, and the number of connections to a host from which it may not."""

    suite: LooseSuite
    host: MediaHost
    private: list[str]
    peaks: Peaks

    @property
    def port(self) -> int:
        """The port of both hosts."""
        return self.host.port

    def post(self, part: Any) -> httpx.Response:
        """Sends a chat with a part as PART, behind a good image."""
        messages = [
            user_message({"type": "text", "text": "Hi."}),
            {"role": "assistant", "content": "Hello."},
            user_message({"type": "text", "text": "What is it?"}, part),
        ]
        body = {"model": "tiny", "max_tokens": 60, "messages": messages}
        return httpx.post(f"{self.suite.url}/v1/chat/completions", json=body, timeout=60)

    def fetch(self, url: str) -> httpx.Response:
        """Sends a chat with the image of a URL."""
        return self.post({"type": "image_url", "image_url": {"url": url}})


def refused_as(response: httpx.Response, code: str, part: str = PART) -> None:
    error = response.json()["error"]
    assert (error["param"], error["code"]) == (part, code), error
    assert response.status_code == (413 if code == TOO_LARGE else 400)
    assert part in error["message"]


@contextmanager
def running_host() -> Iterator[tuple[MediaHost, list[str]]]:
    """Yields the host at EXEMPT, and the connections to the same port of other addresses of loopback."""
    private: list[str] = []
    started: list[MediaHost] = []
    ready, loop = threading.Event(), asyncio.new_event_loop()
    done = asyncio.Event()

    async def count(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        private.append(str(writer.get_extra_info("sockname")))
        writer.close()

    async def serve() -> None:
        async with media_host(EXEMPT) as host:
            servers = [await asyncio.start_server(count, "127.0.0.1", host.port)]
            with suppress(OSError):  # machines without IPv6
                servers.append(await asyncio.start_server(count, "::1", host.port, family=socket.AF_INET6))
            started.append(host)
            ready.set()
            await done.wait()
            for server in servers:
                server.close()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), daemon=True)
    thread.start()
    assert ready.wait(20)
    try:
        yield started[0], private
    finally:
        loop.call_soon_threadsafe(done.set)
        thread.join(20)


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacked]:
    folder = tmp_path_factory.mktemp("media")
    answers = {
        "media.test": [[EXEMPT]],
        "rebinding.media.test": [[EXEMPT], ["127.0.0.1"]],
        "private.media.test": [["127.0.0.1", "::1", "10.0.0.1", "169.254.169.254", "fe80::1%lo", "::ffff:127.0.0.1"]],
        "both.media.test": [["127.0.0.1", EXEMPT]],
    }
    with pytest.MonkeyPatch.context() as patch, running_host() as (host, private):
        write_script(folder / "names.json", host.authority, answers)
        patch.setenv(SCRIPTED_NAMES, str(folder / "names.json"))
        patch.setenv("SLUICE_PREPROCESS_MEDIA_HOSTS", f"*:{host.port},*")
        for name, value in LIMITS.items():
            patch.setenv(name, value)
        model = build_qwen2_vl(folder / "model")
        through = "tests.support.servers.scripted_names"
        with LooseSuite(model, workers=1, postprocess=1, worker_flags=("--speedup", "20"), through=through) as suite:
            found = Attacked(suite, host, private, Peaks(suite.pid("preprocess")))
            host.answers["/red"] = response(picture(RED))
            assert text_of(found.fetch(f"https://media.test:{host.port}/red")).startswith(described(RED))
            found.peaks.measure()
            found.peaks.before = found.peaks.found[found.peaks.pid]
            yield found


@pytest.fixture(autouse=True)
def _measured(attacked: Attacked) -> Iterator[None]:
    """Measures memory after each test, which must have connected to no private address."""
    yield
    attacked.peaks.measure()
    assert attacked.private == []


def text_of(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["message"]["content"])


PRIVATE_HOSTS = (
    *("127.0.0.1", "127.1", "127.0.1", "2130706433", "0x7f000001", "0x7f.1", "0177.0.0.1", "017700000001"),
    *("127.0.0.1.", "0", "0.0.0.0", "localhost", "LOCALHOST.", "127.255.255.254", "%31%32%37.0.0.1", "①②⑦.0.0.1"),
    *("[::1]", "[0:0:0:0:0:0:0:1]", "[::]", "[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "[::127.0.0.1]", "[fe80::1]"),
    *("[64:ff9b::7f00:1]", "[2002:7f00:1::]", "[fd00:ec2::254]", "[::1%25lo]", "10.0.0.1", "192.168.0.1", "172.16.0.1"),
    *(
        "169.254.169.254",
        "0xa9fea9fe",
        "2852039166",
        "0251.0376.0251.0376",
        "100.64.0.1",
        "224.0.0.1",
        "255.255.255.255",
    ),
    *(
        "private.media.test",
        "user@127.0.0.1",
        "media.test@127.0.0.1",
        "127.0.0.1#@media.test",
        "127.0.0.1\\@media.test",
    ),
)


@pytest.mark.parametrize("host", PRIVATE_HOSTS)
def test_url_of_a_private_address_in_any_spelling_is_refused_without_a_connection(
    attacked: Attacked, host: str
) -> None:
    before = len(attacked.host.requests)
    response = attacked.fetch(f"https://{host}:{attacked.port}/red")
    error = response.json()["error"]
    assert response.status_code == 400, response.text
    assert error["param"] == PART
    assert error["code"] == REFUSED or "cannot be resolved" in error["message"], error
    assert len(attacked.host.requests) == before


@pytest.mark.parametrize(
    "url", ["http://media.test/red", "ftp://media.test/red", "file:///etc/passwd", "//media.test/red", "", "gopher://a"]
)
def test_url_of_another_scheme_is_refused_without_a_connection(attacked: Attacked, url: str) -> None:
    refused_as(attacked.fetch(url), INVALID)


def test_name_whose_address_changes_is_resolved_for_each_fetch_and_checked_again(attacked: Attacked) -> None:
    url = f"https://rebinding.media.test:{attacked.port}/red"
    assert text_of(attacked.fetch(url)).startswith(described(RED))
    for _ in range(2):
        refused_as(attacked.fetch(url), REFUSED)
    assert text_of(attacked.fetch(f"https://both.media.test:{attacked.port}/red")).startswith(described(RED))


def test_redirect_to_a_private_address_is_refused_and_one_to_a_public_address_is_followed(attacked: Attacked) -> None:
    port = attacked.port
    targets = (
        f"https://127.0.0.1:{port}/red",
        f"https://2130706433:{port}/red",
        f"https://[::ffff:127.0.0.1]:{port}/red",
        f"https://private.media.test:{port}/red",
        f"//localhost:{port}/red",
        f"http://media.test:{port}/red",
        "file:///etc/passwd",
        "https://media.test:22/red",
        "/loop",
    )
    for number, target in enumerate((*targets, "/red")):
        attacked.host.answers["/loop"] = response(b"", "302 Found", "Location: /loop")
        attacked.host.answers[f"/{number}"] = response(b"", "302 Found", f"Location: {target}")
        found = attacked.fetch(f"https://media.test:{port}/{number}")
        if target == "/red":
            assert text_of(found).startswith(described(RED))
        else:
            refused_as(found, REFUSED)


async def _announced(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 10000000000\r\n\r\n")
    await _endless(writer, 65_536)


async def _unannounced(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
    await _endless(writer, 65_536)


async def _endless_head(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\n")
    await _endless(writer, 1_000)


async def _endless(writer: asyncio.StreamWriter, size: int) -> None:
    while not writer.is_closing():
        writer.write(b"a" * size)
        await writer.drain()
        await asyncio.sleep(0)


async def _dripping(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
    while not writer.is_closing():
        writer.write(b"a")
        await writer.drain()
        await asyncio.sleep(0.3)


async def _silent(writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(5)


async def _cut(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nabc")
    await writer.drain()


HOSTILE_ANSWERS = {
    "announced": (_announced, TOO_LARGE),
    "unannounced": (_unannounced, TOO_LARGE),
    "head": (_endless_head, FAILED),
    "dripping": (_dripping, FAILED),
    "silent": (_silent, FAILED),
    "cut": (_cut, FAILED),
    "gone": (response(b"", "410 Gone"), FAILED),
    "packed": (response(b"abc", "200 OK", "Content-Encoding: gzip"), FAILED),
    "page": (response(b"<!doctype html><p>Please log in."), INVALID),
    "bomb": (response(png_bomb(9_000, 9_000)), INVALID),
}


def test_hostile_answers_of_an_allowed_host_are_refused_side_by_side(attacked: Attacked) -> None:
    url = f"https://media.test:{attacked.port}"
    attacked.host.answers |= {f"/{name}": handler for name, (handler, _) in HOSTILE_ANSWERS.items()}
    found: dict[str, httpx.Response] = {}

    def fetch(name: str) -> None:
        found[name] = attacked.fetch(f"{url}/{name}")

    threads = [threading.Thread(target=fetch, args=(name,)) for name in HOSTILE_ANSWERS]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive():
            thread.join(0.05)
            attacked.peaks.measure()
    for name, (_, code) in HOSTILE_ANSWERS.items():
        refused_as(found[name], code)


def test_image_that_changes_between_turns_is_another_image_and_one_that_is_gone_is_refused(attacked: Attacked) -> None:
    url = f"https://media.test:{attacked.port}/turns"
    for color in (RED, BLUE):
        attacked.host.answers["/turns"] = response(picture(color))
        assert text_of(attacked.fetch(url)).startswith(described(color))
    del attacked.host.answers["/turns"]
    refused_as(attacked.fetch(url), FAILED)


def _png_of_no_width() -> bytes:
    return png_declaring(0, 5)


def _polyglot() -> bytes:
    """Returns a page of HTML with a picture behind it."""
    return b"<html><script>alert(1)</script></html>" + picture(RED)


def _bmp_declaring(side: int) -> bytes:
    return b"BM" + struct.pack("<IHHIIiiHHIIiiII", 54, 0, 0, 54, 40, side, side, 1, 24, 0, 0, 0, 0, 0, 0)


SVG = b'<svg xmlns="http://www.w3.org/2000/svg"><image href="https://127.0.0.1/a.png"/></svg>'
FILES: dict[str, tuple[str, bytes]] = {
    "png bomb": ("image/png", png_bomb(9_000, 9_000)),
    "png of a huge size": ("image/png", png_declaring(2**31 - 1, 2**31 - 1)),
    "png of a long side": ("image/png", png_declaring(100_000, 1)),
    "png of no width": ("image/png", _png_of_no_width()),
    "gif of many frames": ("image/gif", gif_of_frames(100_000)),
    "gif of a huge canvas": ("image/gif", gif_of_frames(1, 65_535)),
    "bmp of a huge size": ("image/bmp", _bmp_declaring(30_000)),
    "svg": ("image/svg+xml", SVG),
    "svg as png": ("image/png", SVG),
    "page before a picture": ("image/png", _polyglot()),
    "archive": ("image/png", b"PK\x03\x04" + bytes(64)),
    "document": ("image/png", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"),
    "photo of many scans": ("image/jpeg", jpeg_of_scans(SIDE, SIDE, 500)),
    "picture cut off": ("image/png", picture(RED)[:-20]),
    "photo cut off": ("image/jpeg", image_file(64, 48, "JPEG")[:300]),
    "nothing": ("image/png", b""),
    "noise": ("image/png", b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 8),
}


@pytest.mark.parametrize("name", FILES)
def test_hostile_file_is_refused_by_part(attacked: Attacked, name: str) -> None:
    media_type, data = FILES[name]
    url = f"data:{media_type};base64," + base64.b64encode(data).decode()
    refused_as(attacked.fetch(url), INVALID)


@pytest.mark.parametrize(
    "url",
    [
        "data:image/png;base64,%%%%",
        "data:image/png;base64,iVBORw0KGgo",
        "data:image/png;base64,AAAA AAAA",
        "data:image/png,AAAA",
        "data:;base64,AAAA",
        "data:image/png;base64",
    ],
)
def test_broken_data_url_is_refused_by_part(attacked: Attacked, url: str) -> None:
    refused_as(attacked.fetch(url), INVALID)


def test_too_many_images_and_too_large_ones_are_refused_by_part(attacked: Attacked) -> None:
    body = {"model": "tiny", "messages": [user_message(*[image_url(RED)] * 101)]}
    found = httpx.post(f"{attacked.suite.url}/v1/chat/completions", json=body, timeout=60)
    refused_as(found, "too_many_media", "messages[0].content[100]")
    refused_as(attacked.fetch(data_url(picture(RED) + bytes(FILE_MB << 20))), TOO_LARGE)


def test_part_of_the_other_apis_is_named_in_their_words(attacked: Attacked) -> None:
    url = f"https://127.0.0.1:{attacked.port}/red"
    block = {"type": "image", "source": {"type": "url", "url": url}}
    body = {"model": "tiny", "max_tokens": 8, "messages": [user_message({"type": "text", "text": "a"}, block)]}
    message = httpx.post(f"{attacked.suite.url}/v1/messages", json=body, timeout=60)
    assert message.status_code == 400
    assert "messages.0.content.1" in message.json()["error"]["message"]
    items = [user_message({"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": url})]
    found = httpx.post(f"{attacked.suite.url}/v1/responses", json={"model": "tiny", "input": items}, timeout=60)
    refused_as(found, REFUSED, "input[0].content[1]")


def test_memory_stays_bounded_and_all_processes_live_on(attacked: Attacked) -> None:
    for name in ("png bomb", "gif of many frames", "png of a huge size"):
        media_type, data = FILES[name]
        attacked.fetch(f"data:{media_type};base64," + base64.b64encode(data + name.encode()).decode())
        attacked.peaks.measure()
    attacked.fetch(data_url(png_bomb(SIDE, SIDE)))  # the largest that is decoded
    attacked.peaks.measure()
    found = dict(attacked.peaks.found)
    own = found.pop(attacked.peaks.pid)
    assert own - attacked.peaks.before < MAX_GROWTH_MIB
    assert DECODED_MIB < max(found.values()) < MAX_CHILD_MIB
    attacked.suite.wait_ready(1)
    assert text_of(attacked.post(image_url(BLUE))).startswith(described(BLUE))
