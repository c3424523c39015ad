"""What a worker says about itself."""

from __future__ import annotations

import tempfile
from pathlib import Path

import grpc

from services.common.hashing import HASH_SCHEME
from services.common.packing import unpack_u32
from services.worker.contract.capabilities import Capability
from sluice.conformance.rule import NotClaimed, expect, rule
from sluice.conformance.subject import Subject
from sluice.conformance.texts import fetch_tokenizer
from sluice.v1 import common_pb2, worker_pb2


@rule(
    "info",
    "GetInfo names worker, engine and model, and says the same every time within an epoch.",
    "worker.proto, GetInfoResponse",
    generates=False,
)
async def info(subject: Subject) -> str:
    said = subject.info
    for name, value in (("worker_id", said.worker_id), ("engine", said.engine), ("card.model", said.card.model)):
        expect(bool(value.strip()), f"{name} is empty.")
    expect(said.epoch > 0, "epoch is 0; it must rise with every start of the worker.")
    expect(not said.draining, "The worker is draining: it takes no requests.")
    again = await subject.answer(subject.stub.GetInfo(worker_pb2.GetInfoRequest()))
    expect(again.epoch == said.epoch, f"epoch went from {said.epoch} to {again.epoch} between two calls.")
    expect(again.worker_id == said.worker_id, "worker_id differs between two calls.")
    return f"{said.worker_id} runs {said.engine} {said.engine_version} with model {said.card.model}."


@rule("card", "The model card agrees with itself.", "common.proto, ModelCard", generates=False)
async def card(subject: Subject) -> str:
    said = subject.card
    listed = list(said.capabilities)
    expect(Capability.TOKEN_IDS in listed, "The capability token_ids is missing; every engine has it.")
    expect(len(listed) == len(set(listed)), "A capability is listed twice.")
    strangers = sorted(set(listed) - set(Capability))
    expect(not strangers, f"Capabilities {', '.join(strangers)} are none that the contract knows.")
    _check_cache(said)
    eos = unpack_u32(said.eos_token_ids, "eos_token_ids")
    outside = [token_id for token_id in eos if said.vocab_size and token_id >= said.vocab_size]
    expect(not outside, f"End-of-sequence ids {outside} are outside the vocabulary of {said.vocab_size}.")
    expect(len(set(said.adapters)) == len(said.adapters), "An adapter is listed twice.")
    expect(said.model not in said.adapters, "An adapter has the model's own name.")
    expect(not said.adapters or Capability.LORA in listed, "Adapters are listed without the capability lora.")
    return f"{len(listed)} capabilities, vocabulary of {said.vocab_size}, context of {said.context_length}."


def _check_cache(said: common_pb2.ModelCard) -> None:
    if Capability.KV_EVENTS in said.capabilities:
        expect(said.block_size > 0, "kv_events are claimed with a block_size of 0.")
    if said.block_size:
        expect(said.hash_scheme == HASH_SCHEME, f"hash_scheme is {said.hash_scheme!r}, not {HASH_SCHEME!r}.")
        expect(said.total_blocks > 0, "block_size is set and total_blocks is 0: the index would have no bound.")


@rule(
    "tokenizer-files",
    "GetTokenizer streams whole files whose content matches the fingerprint on the card.",
    "worker.proto, TokenizerChunk; common.proto, TokenizerSpec.fingerprint",
    generates=False,
)
async def tokenizer_files(subject: Subject) -> str:
    wanted = subject.card.tokenizer.fingerprint
    if not wanted:
        raise NotClaimed("The card carries no tokenizer fingerprint.")
    with tempfile.TemporaryDirectory(prefix="sluice-conformance-") as folder:
        files = await fetch_tokenizer(subject, Path(folder))
        # The store keeps a tokenizer under the fingerprint it was checked by.
        expect(wanted in files.parts, f"The stream belongs to another fingerprint than the card's {wanted[:12]}….")
        names = sorted(path.name for path in files.rglob("*")) if files.is_dir() else [files.name]
    return f"{', '.join(names)} match {wanted[:12]}…."


@rule(
    "info-under-load",
    "GetInfo answers within a second while 32 generations run.",
    "worker.proto, GetInfo: schedulers and probes ask it at any time",
)
async def info_under_load(subject: Subject) -> str:
    asked = subject.patience.answer_s / 10
    async with subject.session() as caller:
        running = await caller.start(*(subject.long() for _ in range(32)))
        await caller.began(running[0])
        for _ in range(5):
            try:
                await subject.stub.GetInfo(worker_pb2.GetInfoRequest(), timeout=asked)
            except grpc.aio.AioRpcError as error:
                late = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
                expect(not late, f"No answer within {asked:g} s.")
                raise
    return f"Five answers, each within {asked:g} s."
