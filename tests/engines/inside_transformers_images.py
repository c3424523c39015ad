"""Images in the transformers engine, beside `generate` of the same model in the same environment.

``python inside_transformers_images.py FOLDER WHAT``; prints "ok", or fails with an assertion.
"""

from __future__ import annotations

import asyncio
import io
import random
import sys
import time
from array import array
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import numpy
from PIL import Image

from services.common.base.errors import ErrorKind, SluiceError
from services.common.types.media.spans import MediaFile, MediaKind, MediaSpan, content_hash
from services.worker.contract.delta_stream import DeltaStream
from services.worker.contract.engine import GenerateContext
from services.worker.contract.generation import (
    Delta,
    FinishReason,
    GenerateRequest,
    MediaItem,
    SamplingParams,
    StopParams,
)
from services.worker.engines.transformers.engine import MAX_ENCODED, TransformersEngine
from services.worker.settings import WorkerSettings
from tests.engines.offline_transformers_images import Reference
from tests.support.data.tiny_vlm import LLAVA_TOKENS_PER_IMAGE

CONVERSATIONS = 50
TOKENS = 16
WORDS = ("what", "is", "it", "a", "red", "blue", "picture", "of", "the", "sea", "under", "two", "large", "trees")
GREEDY = SamplingParams(temperature=0.0)


def picture(source: random.Random, noise: numpy.random.Generator) -> bytes:
    """A file of any size, mode and format; some are to be rotated."""
    size = source.randint(30, 300), source.randint(30, 300)
    image = Image.fromarray(noise.integers(0, 256, (*size[::-1], 3), "uint8").repeat(1, axis=2))
    image = image.resize((size[0] // 8 + 1, size[1] // 8 + 1)).resize(size)
    mode, form = source.choice([("RGB", "JPEG"), ("RGB", "PNG"), ("L", "PNG"), ("RGBA", "PNG"), ("RGB", "WEBP")])
    exif = Image.Exif()
    exif[0x0112] = source.choice([1, 3, 6, 8])
    file = io.BytesIO()
    image.convert(mode).save(file, form, exif=exif)
    return file.getvalue()


def conversation(source: random.Random, pictures: int) -> list[dict[str, Any]]:
    """A chat of up to three messages whose pictures lie anywhere in those of the user."""

    def words() -> dict[str, Any]:
        return {"type": "text", "text": " ".join(source.choices(WORDS, k=source.randint(1, 8)))}

    parts = [{"type": "image"} for _ in range(pictures)] + [words() for _ in range(source.randint(1, 3))]
    source.shuffle(parts)
    if len(parts) < 3 or source.random() < 0.5:
        return [{"role": "user", "content": parts}]
    return [
        {"role": "user", "content": parts[:2]},
        {"role": "assistant", "content": words()["text"]},
        {"role": "user", "content": parts[2:]},
    ]


def request_of(name: str, ids: list[int], files: Sequence[bytes], placeholder: int, **fields: Any) -> GenerateRequest:
    """A request whose items are the runs of placeholders; where runs touch, all items have the same length."""
    runs = [list(run) for is_item, run in groupby(enumerate(ids), lambda pair: pair[1] == placeholder) if is_item]
    if len(runs) != len(files):
        length = LLAVA_TOKENS_PER_IMAGE
        runs = [run[start : start + length] for run in runs for start in range(0, len(run), length)]
    items = []
    for run, data in zip(runs, files, strict=True):
        digest = content_hash(data)
        span = MediaSpan(MediaKind.IMAGE, digest, run[0][0], len(run), array("I", [placeholder]).tobytes(), len(run))
        items.append(MediaItem(span, MediaFile(digest, data)))
    defaults: dict[str, Any] = {"sampling": GREEDY, "stop": StopParams(max_tokens=TOKENS)}
    return GenerateRequest(name, "tiny", array("I", ids), media=tuple(items), **{**defaults, **fields})


async def engine_of(folder: str, **fields: Any) -> TransformersEngine:
    """A started engine."""
    engine = TransformersEngine.from_args(WorkerSettings(**{"model": f"tiny={folder}", "block_size": 16, **fields}))
    await engine.start("inside")
    return engine


async def run(engine: TransformersEngine, request: GenerateRequest) -> list[Delta]:
    """All deltas of one request."""
    return [delta async for delta in engine.generate(request, GenerateContext(request.request_id))]


async def ids(engine: TransformersEngine, request: GenerateRequest) -> list[int]:
    """Tokens of a request that ended well."""
    deltas = await run(engine, request)
    assert deltas[-1].finish_reason in (FinishReason.LENGTH, FinishReason.STOP), deltas[-1]
    assert deltas[-1].usage is not None
    assert deltas[-1].usage.prompt_tokens == len(request.token_ids)
    return [token_id for delta in deltas for token_id in delta.token_ids]


async def refusal(engine: TransformersEngine, request: GenerateRequest) -> SluiceError:
    """The error of a request, at once or as its end."""
    try:
        deltas = await run(engine, request)
    except SluiceError as error:
        return error
    assert not any(delta.token_ids for delta in deltas)
    assert deltas[-1].error is not None
    return deltas[-1].error


async def until_quiet(engine: TransformersEngine) -> None:
    """Waits until no request runs or waits."""
    deadline = time.monotonic() + 60
    while (load := engine.load()[0]).running_requests + load.waiting_requests + load.used_blocks:
        assert time.monotonic() < deadline, load
        await asyncio.sleep(0.01)


class Asked:
    """Requests with pictures, and the answers of `generate`."""

    def __init__(self, folder: str, count: int, seed: int = 18, most: int = 4, tokens: int = TOKENS) -> None:
        reference = Reference(folder)
        self.placeholder = int(reference.processor.image_token_id)
        source, noise = random.Random(seed), numpy.random.default_rng(seed)
        self.requests: list[GenerateRequest] = []
        self.expected: list[list[int]] = []
        stop = StopParams(max_tokens=tokens)
        for number in range(count):
            files = [picture(source, noise) for _ in range(number % most + 1)]
            inputs = reference.prompt(conversation(source, len(files)), files)
            prompt = inputs["input_ids"][0].tolist()
            self.requests.append(request_of(f"r{number}", prompt, files, self.placeholder, stop=stop))
            self.expected.append(reference.answer(inputs, tokens))
        inputs = reference.prompt([{"role": "user", "content": [{"type": "text", "text": "what is it?"}]}], [])
        self.text = request_of("text", inputs["input_ids"][0].tolist(), [], self.placeholder, stop=stop)
        self.text_expected = reference.answer(inputs, tokens)


async def conversations(folder: str) -> None:
    """Fifty conversations, one after the other and together, are answered as `generate` answers them."""
    asked = Asked(folder, CONVERSATIONS)
    engine = await engine_of(folder)
    assert "image" in engine._ready().config.capabilities
    together = await asyncio.gather(*(ids(engine, request) for request in [*asked.requests, asked.text]))
    expected = [*asked.expected, asked.text_expected]
    wrong = [number for number, found in enumerate(together) if found != expected[number]]
    assert not wrong, wrong
    assert len({tuple(found) for found in together}) > CONVERSATIONS // 2
    for request, answer in zip(asked.requests[:8], asked.expected, strict=False):
        assert await ids(engine, request) == answer
    assert await ids(engine, asked.text) == asked.text_expected
    await until_quiet(engine)
    await engine.cleanup()


async def overflow(folder: str) -> None:
    """More tokens than the cache holds: requests are put back and computed again, with the same answers."""
    asked = Asked(folder, 8, tokens=200)
    longest = max(len(request.token_ids) for request in asked.requests) + 200
    engine = await engine_of(folder, total_blocks=longest // 16 + 12)
    stepper = engine._ready().runner
    put_back: list[int] = []
    original = stepper._put_back  # type: ignore[attr-defined]

    def counted() -> None:
        before = len(stepper._running)  # type: ignore[attr-defined]
        original()
        put_back.append(before - len(stepper._running))  # type: ignore[attr-defined]
        assert stepper._tokens() <= stepper.cache_tokens  # type: ignore[attr-defined]

    stepper._put_back = counted  # type: ignore[attr-defined]
    together = await asyncio.gather(*(ids(engine, request) for request in asked.requests))
    assert together == asked.expected
    assert sum(put_back) > 0
    await until_quiet(engine)
    await engine.cleanup()


async def sampling(folder: str) -> None:
    """Seeds, stop ids, limits, log-probabilities and resumed tokens, beside other requests."""
    asked = Asked(folder, 3)
    engine = await engine_of(folder)
    request, greedy = asked.requests[1], asked.expected[1]
    seeded = replace(request, sampling=SamplingParams(temperature=1.0, seed=11))
    other = replace(request, sampling=SamplingParams(temperature=1.0, seed=12))
    named = [replace(one, request_id=f"s{i}") for i, one in enumerate([seeded, seeded, other, request])]
    first, second, third, beside = await asyncio.gather(*(ids(engine, one) for one in named))
    assert first == second != third
    assert beside == greedy
    assert await ids(engine, seeded) == first
    place = next(index for index in range(2, TOKENS) if greedy[index] not in greedy[:index])
    stop = StopParams(max_tokens=TOKENS, stop_token_ids=frozenset({greedy[place]}))
    deltas = await run(engine, replace(request, stop=stop))
    assert [token_id for delta in deltas for token_id in delta.token_ids] == greedy[: place + 1]
    assert deltas[-1].finish_reason is FinishReason.STOP
    assert deltas[-1].stop_token_id == greedy[place]
    short = await run(engine, replace(request, stop=StopParams(max_tokens=1)))
    assert short[-1].finish_reason is FinishReason.LENGTH
    assert short[0].cached_tokens == 0
    assert len(await ids(engine, replace(request, stop=replace(stop, min_tokens=place + 3)))) >= place + 3
    found = await run(engine, replace(request, logprobs=3))
    positions = [one for delta in found for one in delta.logprobs]
    assert [one.chosen.token_id for one in positions] == greedy
    assert all(one.chosen.rank == 1 and len(one.top) >= 3 for one in positions)
    # A request that goes on where another worker stopped: also behind a placeholder that the model generated.
    for resumed in (greedy[:5], [asked.placeholder, *greedy[:2]]):
        allowed = replace(request, sampling=SamplingParams(temperature=0.0, allowed_token_ids=(asked.placeholder,)))
        assert await ids(engine, replace(allowed, stop=StopParams(max_tokens=2))) == [asked.placeholder] * 2
        carried = replace(
            request,
            token_ids=request.token_ids + array("I", resumed),
            resumed_tokens=len(resumed),
            stop=StopParams(max_tokens=TOKENS - len(resumed)),
        )
        rest = await ids(engine, carried)
        assert len(rest) == TOKENS - len(resumed)
        later = replace(
            carried,
            token_ids=carried.token_ids + array("I", rest[:3]),
            resumed_tokens=len(resumed) + 3,
            stop=StopParams(max_tokens=TOKENS - len(resumed) - 3),
        )
        assert [*rest[:3], *await ids(engine, later)] == rest
        if resumed == greedy[:5]:
            assert [*resumed, *rest] == greedy
    await until_quiet(engine)
    await engine.cleanup()


async def cancels(folder: str) -> None:
    """Requests cancelled at any moment end at once and leave nothing; the one beside them goes on."""
    asked = Asked(folder, 8, tokens=200)
    engine = await engine_of(folder, max_sequences=4)
    source = random.Random(5)
    beside = asyncio.create_task(ids(engine, replace(asked.requests[0], request_id="beside")))

    async def leave(number: int) -> None:
        name = f"c{number}"
        request = replace(asked.requests[number % 8], request_id=name)
        stream, context = DeltaStream(), GenerateContext(name)
        engine.submit(request, context, stream)
        await asyncio.sleep(source.choice((0, 0, 0.001, 0.02, 0.1, 0.3)))
        engine.abort(context)
        last = [delta async for delta in stream.deltas()][-1]
        assert last.finish_reason in (FinishReason.CANCELLED, FinishReason.LENGTH, FinishReason.STOP), last

    await asyncio.gather(*(leave(number) for number in range(100)))
    assert await beside == asked.expected[0]
    await until_quiet(engine)
    deadline = time.monotonic() + 60
    while engine._pictures._free._value != MAX_ENCODED:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)
    assert not engine._pictures._held
    assert await ids(engine, asked.requests[1]) == asked.expected[1]
    await engine.cleanup()


async def refusals(folder: str) -> None:
    """Prompts and pictures that do not belong together are refused, and serving goes on."""
    asked = Asked(folder, 2)
    engine = await engine_of(folder)
    good = asked.requests[1]
    first, second = good.media
    longer = replace(first, span=replace(first.span, length=first.span.length + 1))
    shorter = replace(first, span=replace(first.span, length=first.span.length - 1))
    text_only = replace(good, media=())
    moved = replace(first, span=replace(first.span, offset=first.span.offset + 1))
    broken = replace(first, file=replace(first.file, data=first.file.data[:200]))
    no_picture = replace(first, file=replace(first.file, data=b"%!PS-Adobe-3.0 EPSF-3.0\n"))
    for media in ((), (second,), (longer, second), (shorter, second), (second, first), (moved, second)):
        error = await refusal(engine, replace(good, media=media))
        assert (error.kind, error.param) == (ErrorKind.INVALID_ARGUMENT, "media"), (media, error)
    for media in ((broken, second), (no_picture, second)):
        error = await refusal(engine, replace(good, media=media))
        assert (error.kind, error.code) == (ErrorKind.INVALID_ARGUMENT, "invalid_media"), error
    assert (await refusal(engine, text_only)).param == "media"
    # One more placeholder in the item and in the prompt: only the model's features show that it is wrong.
    start, end = first.span.offset, first.span.end
    ids_more = [*good.token_ids[:end], asked.placeholder, *good.token_ids[end:]]
    later = replace(second, span=replace(second.span, offset=second.span.offset + 1))
    error = await refusal(engine, replace(good, token_ids=array("I", ids_more), media=(longer, later)))
    assert error.kind is ErrorKind.INTERNAL
    assert "placeholder tokens" in error.message
    ids_less = [*good.token_ids[:start], *good.token_ids[start + 1 :]]
    later = replace(second, span=replace(second.span, offset=second.span.offset - 1))
    error = await refusal(engine, replace(good, token_ids=array("I", ids_less), media=(shorter, later)))
    assert error.kind is ErrorKind.INTERNAL
    assert not engine._pictures._held
    assert await ids(engine, good) == asked.expected[1]
    await until_quiet(engine)
    await engine.cleanup()


async def death(folder: str) -> None:
    """A lost device ends the thread: requests end with a retryable error, and the worker is notified."""
    asked = Asked(folder, 2, tokens=200)
    engine = await engine_of(folder)
    told: list[str] = []
    engine.on_failure = lambda name, error: told.append(f"{name}: {error}")
    streams = []
    for request in asked.requests:
        streams.append(DeltaStream())
        engine.submit(request, GenerateContext(request.request_id), streams[-1])
    running = streams[0].deltas()
    await anext(running)
    vision = engine._ready().vision
    assert vision is not None

    def broken(*arguments: Any, **named: Any) -> None:
        raise RuntimeError("CUDA error: the device is gone")

    vision.logits = broken  # type: ignore[method-assign]
    for deltas in (running, streams[1].deltas()):
        last = [delta async for delta in deltas][-1]
        assert last.error is not None
        assert last.error.retryable
    deadline = time.monotonic() + 30
    while not told:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)
    assert told == ["transformers-steps: CUDA error: the device is gone"]
    await engine.cleanup()


if __name__ == "__main__":
    cases = {case.__name__: case for case in (conversations, overflow, sampling, cancels, refusals, death)}
    asyncio.run(cases[sys.argv[2]](sys.argv[1]))
    print("ok")
