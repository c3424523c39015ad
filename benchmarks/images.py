"""Measures what images cost: clients that send a new picture each second, beside clients of text.

A second process sends the pictures, so that their cost at the client does not delay the text whose times are measured.
Calm and loaded phases follow in turns in one run; the text requests are the same in both. The mock engine's steps take
a fixed time, however much they prefill, or the pictures' prefill alone would occupy it: the services are measured.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random
from statistics import median
from typing import Annotated, Any
from urllib.parse import urlsplit

import httpx
import typer
import uvloop
from PIL import Image, ImageFilter
from processes import cpu_seconds, own_suite, resident_bytes, suite_of
from prompt_text import Text
from report import percentiles_ms
from rich.console import Console
from rich.table import Table

MODEL = "tekken"
SERVICES = ("gateway", "preprocess", "router", "postprocess")
JPEG_START = b"\xff\xd8"
COMMENT = b"\xff\xfe"
ANSWER_WITHIN_S = 60.0

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@dataclass(frozen=True)
class ImageLoad:
    """Clients that send one chat with one new picture each `every_s` seconds."""

    url: str
    clients: int
    every_s: float
    seconds: float
    picture: bytes


@dataclass
class Sent:
    """What came back: seconds of the answers in time, and the others by status or error."""

    answered_s: list[float] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)


def made_picture(width: int, height: int, target_bytes: int) -> bytes:
    """A JPEG of that size in pixels and about that many bytes: blurred noise, as detailed as the target asks for."""
    noise = Image.frombytes("RGB", (width, height), Random(1).randbytes(3 * width * height))
    blurred = noise.filter(ImageFilter.GaussianBlur(1.5))
    best = b""
    for quality in range(20, 96, 5):
        file = io.BytesIO()
        blurred.save(file, "JPEG", quality=quality)
        if not best or abs(len(file.getvalue()) - target_bytes) < abs(len(best) - target_bytes):
            best = file.getvalue()
    return best


def numbered(picture: bytes, number: int) -> bytes:
    """The same picture as another file: a JPEG comment holds the number."""
    text = f"{number:032d}".encode()
    return JPEG_START + COMMENT + (len(text) + 2).to_bytes(2, "big") + text + picture[len(JPEG_START) :]


def _image_body(picture: bytes, number: int) -> bytes:
    """One chat with a new picture; the text before it differs too."""
    url = b"data:image/jpeg;base64," + base64.b64encode(numbered(picture, number))
    head = f'{{"model":"{MODEL}","max_tokens":4,"messages":[{{"role":"user","content":['
    text = f'{{"type":"text","text":"{number}"}},'
    return (head + text).encode() + b'{"type":"image_url","image_url":{"url":"' + url + b'"}}]}]}'


async def _send_images(load: ImageLoad) -> Sent:
    sent, limits = Sent(), httpx.Limits(max_connections=None, max_keepalive_connections=load.clients)
    ends = time.perf_counter() + load.seconds
    first = time.time_ns() // 1_000_000 * 100_000

    async def client(place: int, http: httpx.AsyncClient) -> None:
        await asyncio.sleep(load.every_s * place / load.clients)
        turn = 0
        while (began := time.perf_counter()) < ends:
            body = _image_body(load.picture, first + turn * load.clients + place)
            try:
                answer = await http.post(
                    "/v1/chat/completions", content=body, headers={"content-type": "application/json"}
                )
                if answer.status_code == 200:
                    sent.answered_s.append(time.perf_counter() - began)
                else:
                    sent.errors[f"{answer.status_code} {answer.text[:120]}"] += 1
            except httpx.HTTPError as error:
                sent.errors[repr(error)] += 1
            turn += 1
            await asyncio.sleep(max(0.0, began + load.every_s - time.perf_counter()))

    async with httpx.AsyncClient(base_url=load.url, timeout=ANSWER_WITHIN_S, limits=limits) as http:
        await asyncio.gather(*(client(place, http) for place in range(load.clients)))
    return sent


def _image_process(load: ImageLoad, answers: multiprocessing.SimpleQueue[Sent]) -> None:
    answers.put(uvloop.run(_send_images(load)))


async def _send_texts(url: str, per_s: float, seconds: float, prompt_tokens: int) -> tuple[Sent, list[float]]:
    """Open loop: one streamed chat each 1 / per_s seconds; also the seconds to the first event."""
    sent, first_s, text_of = Sent(), list[float](), Text(seed=2)

    async def one(http: httpx.AsyncClient, text: str) -> None:
        body = {"model": MODEL, "max_tokens": 16, "stream": True, "messages": [{"role": "user", "content": text}]}
        began = time.perf_counter()
        try:
            async with http.stream("POST", "/v1/chat/completions", json=body) as answer:
                whole = b"".join([part async for part in _timed(answer.aiter_raw(), began, first_s)])
        except httpx.HTTPError as error:
            sent.errors[repr(error)] += 1
            return
        if b"data: [DONE]" in whole:
            sent.answered_s.append(time.perf_counter() - began)
        else:
            sent.errors[f"{answer.status_code} {whole[-120:]!r}"] += 1

    async with (
        httpx.AsyncClient(base_url=url, timeout=ANSWER_WITHIN_S, limits=httpx.Limits(max_connections=None)) as http,
        asyncio.TaskGroup() as tasks,
    ):
        starts = time.perf_counter()
        for number in range(int(per_s * seconds)):
            await asyncio.sleep(max(0.0, starts + number / per_s - time.perf_counter()))
            tasks.create_task(one(http, text_of.of_tokens(prompt_tokens)))
    return sent, first_s


async def _timed(parts: Any, began: float, first_s: list[float]) -> Any:
    first = True
    async for part in parts:
        if first:
            first_s.append(time.perf_counter() - began)
            first = False
        yield part


@app.command()
def images(
    clients: Annotated[int, typer.Option(min=1, help="that send one picture each second")] = 64,
    every_s: Annotated[float, typer.Option(min=0.01, help="seconds between two pictures of a client")] = 1.0,
    width: Annotated[int, typer.Option(min=1, help="of the picture, pixels")] = 1024,
    height: Annotated[int, typer.Option(min=1, help="of the picture, pixels")] = 1024,
    kilobytes: Annotated[int, typer.Option(min=1, help="of the picture's file, about")] = 200,
    text_per_s: Annotated[float, typer.Option(min=0.1, help="chats of text a second")] = 16.0,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="of each chat of text, about")] = 200,
    seconds: Annotated[float, typer.Option(min=1, help="of each phase")] = 15.0,
    rounds: Annotated[int, typer.Option(min=1, help="of a calm and a loaded phase")] = 3,
    workers: Annotated[int, typer.Option(min=1, help="mock workers")] = 2,
    step_ms: Annotated[float, typer.Option(min=0.1, help="of the mock engine: every stream gets a token")] = 10.0,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON instead of a table")] = False,
) -> None:
    """Compare chats of text without and with clients that send pictures, and show the CPU time of a picture."""
    os.environ |= {
        "SLUICE_WORKER_ENGINE_ARGS": f"media=image,timing=fixed,fixed_step_ms={step_ms},fixed_prefill_us=0",
    }
    picture = made_picture(width, height, 1000 * kilobytes)
    found: list[dict[str, Any]] = []
    with own_suite(workers, 1.0) as url:
        services = suite_of(urlsplit(url).port or 80)
        asyncio.run(_send_texts(url, text_per_s, 2.0, prompt_tokens))
        asyncio.run(_send_images(ImageLoad(url, 2, 0.5, 2.0, picture)))
        for _ in range(rounds):
            calm = _phase(url, services, text_per_s, seconds, prompt_tokens, None)
            loaded = _phase(
                url, services, text_per_s, seconds, prompt_tokens, ImageLoad(url, clients, every_s, seconds, picture)
            )
            found.append({"calm": calm, "loaded": loaded})
        resident_mb = {name: value / 1e6 for name, value in resident_bytes(services).items()}
    summary = _summary(found) | {"picture_bytes": len(picture), "resident_mb": resident_mb}
    if as_json:
        print(json.dumps({"summary": summary, "rounds": found}, indent=2))
    else:
        _print(summary)


def _phase(
    url: str, services: Mapping[str, Any], per_s: float, seconds: float, prompt_tokens: int, load: ImageLoad | None
) -> dict[str, Any]:
    answers: multiprocessing.SimpleQueue[Sent] = multiprocessing.SimpleQueue()
    before = cpu_seconds(services)
    process = multiprocessing.Process(target=_image_process, args=(load, answers)) if load is not None else None
    if process is not None:
        process.start()
    text, first_s = uvloop.run(_send_texts(url, per_s, seconds, prompt_tokens))
    images = answers.get() if process is not None else Sent()
    if process is not None:
        process.join()
    used = {name: after - before[name] for name, after in cpu_seconds(services).items()}
    return {
        "cpu_s": {
            kind: sum(value for name, value in used.items() if name.startswith(kind)) for kind in (*SERVICES, "worker")
        },
        "texts": len(text.answered_s),
        "text_ms": percentiles_ms(text.answered_s),
        "first_ms": percentiles_ms(first_s),
        "images": len(images.answered_s),
        "image_ms": percentiles_ms(images.answered_s),
        "errors": dict(text.errors + images.errors),
    }


def _summary(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the rounds; the CPU time of a picture is what its phase used more than the calm one."""
    kinds = found[0]["calm"]["cpu_s"]

    def each(phase: str, figure: str, rank: str) -> float:
        return median(float(one[phase][figure].get(rank, "nan")) for one in found)

    def of_picture(kind: str) -> float:
        figures = (
            1e3 * float(one["loaded"]["cpu_s"][kind] - one["calm"]["cpu_s"][kind]) / max(one["loaded"]["images"], 1)
            for one in found
        )
        return float(median(figures))

    return {
        "cpu_ms_per_picture": {kind: of_picture(kind) for kind in kinds},
        "text_ms": {
            phase: {rank: each(phase, "text_ms", rank) for rank in ("p50", "p90", "p99")}
            for phase in ("calm", "loaded")
        },
        "first_ms": {
            phase: {rank: each(phase, "first_ms", rank) for rank in ("p50", "p90", "p99")}
            for phase in ("calm", "loaded")
        },
        "p99_ratio": median(one["loaded"]["text_ms"]["p99"] / one["calm"]["text_ms"]["p99"] for one in found),
        "first_p99_ratio": median(one["loaded"]["first_ms"]["p99"] / one["calm"]["first_ms"]["p99"] for one in found),
        "image_ms": {rank: each("loaded", "image_ms", rank) for rank in ("p50", "p90", "p99")},
        "images": sum(one["loaded"]["images"] for one in found),
        "errors": dict(sum((Counter(one[phase]["errors"]) for one in found for phase in one), Counter[str]())),
    }


def _print(summary: Mapping[str, Any]) -> None:
    console = Console(width=120, highlight=False)
    times = Table(title="ms (p50 / p90 / p99)")
    for title in ("", "calm", "with pictures", "ratio of p99"):
        times.add_column(title)
    for title, figure, ratio in (
        ("text, whole answer", "text_ms", "p99_ratio"),
        ("text, first event", "first_ms", "first_p99_ratio"),
    ):
        shown = (
            " / ".join(f"{value:.1f}" for value in summary[figure][phase].values()) for phase in ("calm", "loaded")
        )
        times.add_row(title, *shown, f"{summary[ratio]:.2f}")
    times.add_row("picture, whole answer", "", " / ".join(f"{value:.1f}" for value in summary["image_ms"].values()), "")
    console.print(times)
    cost = Table(title=f"one picture of {summary['picture_bytes']:,} bytes; {summary['images']:,} answered")
    for title in ("", "CPU, ms", "resident, MB"):
        cost.add_column(title)
    for kind, value in summary["cpu_ms_per_picture"].items():
        resident = sum(held for name, held in summary["resident_mb"].items() if name.startswith(kind))
        cost.add_row(kind, f"{value:.2f}", f"{resident:.0f}")
    console.print(cost)
    for error, times_seen in summary["errors"].items():
        console.print(f"{times_seen} × {error}", markup=False)


if __name__ == "__main__":
    try:
        app()
    except (OSError, RuntimeError, ValueError) as error:
        sys.exit(f"images.py: {error}")
