"""Rules about embeddings."""

from __future__ import annotations

import math
import uuid
from array import array

from services.common.base.errors import ErrorKind
from services.common.base.packing import pack_u32
from services.worker.contract.capabilities import Capability
from sluice.conformance.exceptions import NotClaimed
from sluice.conformance.refusals import UNSUPPORTED, expect_call_refused
from sluice.conformance.rule import expect, rule
from sluice.conformance.subject import Subject
from sluice.v1 import worker_pb2

FEW_DIMENSIONS = 8


def _request(subject: Subject, *prompts: list[int], dimensions: int = 0) -> worker_pb2.EmbedRequest:
    return worker_pb2.EmbedRequest(
        request_id=f"conformance-{uuid.uuid4().hex}",
        model=subject.card.model,
        inputs=[worker_pb2.TokenPrompt(token_ids=pack_u32(prompt)) for prompt in prompts],
        dimensions=dimensions,
    )


async def _embed(subject: Subject, request: worker_pb2.EmbedRequest) -> tuple[list[array[float]], int]:
    answer = await subject.stub.Embed(request, timeout=subject.patience.generation_s)
    vectors = []
    for embedding in answer.embeddings:
        expect(len(embedding.values) % 4 == 0, "The length of an embedding is not a multiple of 4 bytes (float32).")
        vectors.append(array("f", embedding.values))
    return vectors, answer.usage.prompt_tokens


@rule(
    "embeddings",
    "Embed returns one finite embedding per input, all of the same length and equal for equal ids.",
    "worker.proto, Embed",
)
async def embeddings(subject: Subject) -> str:
    first, second = subject.prompt(), subject.prompt(9)
    request = _request(subject, first, second, first)
    if not subject.claims(Capability.EMBEDDINGS):
        message = await expect_call_refused(subject, subject.stub.Embed(request), *UNSUPPORTED)
        raise NotClaimed(f"Refused: {message}")
    vectors, counted = await _embed(subject, request)
    expect(len(vectors) == 3, f"{len(vectors)} embeddings were returned for 3 inputs.")
    lengths = {len(vector) for vector in vectors}
    expect(len(lengths) == 1 and min(lengths) > 0, f"The embeddings have {sorted(lengths)} values.")
    expect(all(map(math.isfinite, (value for vector in vectors for value in vector))), "A value is not finite.")
    expect(_close(vectors[0], vectors[2]), "The same ids have different embeddings.")
    expect(not _close(vectors[0], vectors[1]), "Different ids have the same embedding.")
    total = 2 * len(first) + len(second)
    expect(counted == total, f"usage has {counted} prompt tokens, {total} were sent.")
    return f"3 embeddings of {lengths.pop()} values."


@rule("embedding-dimensions", "Embeddings have the requested dimensions.", "worker.proto, EmbedRequest.dimensions")
async def embedding_dimensions(subject: Subject) -> str:
    if not subject.claims(Capability.EMBEDDINGS):
        raise NotClaimed("The card does not claim embeddings.")
    vectors, _ = await _embed(subject, _request(subject, subject.prompt(), dimensions=FEW_DIMENSIONS))
    lengths = [len(vector) for vector in vectors]
    expect(lengths == [FEW_DIMENSIONS], f"{lengths} values were returned, {FEW_DIMENSIONS} were requested.")
    return f"{FEW_DIMENSIONS} values."


@rule("bad-embedding-input", "Embed refuses invalid inputs.", "worker.proto, EmbedRequest.inputs")
async def bad_embedding_input(subject: Subject) -> str:
    outside = subject.card.vocab_size or 0xFFFF_FFFF
    call = subject.stub.Embed(_request(subject, [1, outside]))
    kinds = (ErrorKind.INVALID_ARGUMENT,) if subject.claims(Capability.EMBEDDINGS) else UNSUPPORTED
    return f"Refused: {await expect_call_refused(subject, call, *kinds)}"


def _close(left: array[float], right: array[float]) -> bool:
    """Whether two embeddings are equal up to rounding differences between batches."""
    scale = max(map(abs, left), default=0.0) or 1.0
    return len(left) == len(right) and all(
        abs(one - other) <= 1e-3 * scale for one, other in zip(left, right, strict=True)
    )
