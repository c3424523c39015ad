"""Rules about GetInfo, the model card and the tokenizer files."""

from __future__ import annotations

import tempfile
from pathlib import Path

import grpc

from services.common.base.packing import unpack_u32
from services.common.types.hashing import HASH_SCHEME
from services.worker.contract.capabilities import Capability
from sluice.conformance.exceptions import NotClaimed
from sluice.conformance.rule import expect, rule
from sluice.conformance.subject import Subject
from sluice.conformance.texts import fetch_tokenizer
from sluice.v1 import common_pb2, worker_pb2


@rule(
    "info",
    "GetInfo returns worker, engine and model, and the same values throughout an epoch.",
    "worker.proto, GetInfoResponse",
    generates=False,
)
async def info(subject: Subject) -> str:
    info = subject.info
    for name, value in (("worker_id", info.worker_id), ("engine", info.engine), ("card.model", info.card.model)):
        expect(bool(value.strip()), f"{name} is empty.")
    expect(info.epoch > 0, "epoch is 0; it must increase at every start of the worker.")
    expect(not info.draining, "The worker is draining and accepts no requests.")
    again = await subject.call(subject.stub.GetInfo(worker_pb2.GetInfoRequest()))
    expect(again.epoch == info.epoch, f"epoch changed from {info.epoch} to {again.epoch} between two calls.")
    expect(again.worker_id == info.worker_id, "worker_id differs between two calls.")
    return f"{info.worker_id} runs {info.engine} {info.engine_version} with model {info.card.model}."


@rule("card", "The model card is consistent.", "common.proto, ModelCard", generates=False)
async def card(subject: Subject) -> str:
    card = subject.card
    listed = list(card.capabilities)
    expect(Capability.TOKEN_IDS in listed, "The capability token_ids is missing; every engine has it.")
    expect(len(listed) == len(set(listed)), "A capability is listed twice.")
    unknown = sorted(set(listed) - set(Capability))
    expect(not unknown, f"Capabilities {', '.join(unknown)} are not defined by the contract.")
    _check_cache(card)
    eos = unpack_u32(card.eos_token_ids, "eos_token_ids")
    outside = [token_id for token_id in eos if card.vocab_size and token_id >= card.vocab_size]
    expect(not outside, f"End-of-sequence ids {outside} are outside the vocabulary of {card.vocab_size}.")
    expect(len(set(card.adapters)) == len(card.adapters), "An adapter is listed twice.")
    expect(card.model not in card.adapters, "An adapter has the name of the model.")
    expect(not card.adapters or Capability.LORA in listed, "Adapters are listed without the capability lora.")
    return f"{len(listed)} capabilities, vocabulary of {card.vocab_size}, context of {card.context_length}."


def _check_cache(card: common_pb2.ModelCard) -> None:
    if Capability.KV_EVENTS in card.capabilities:
        expect(card.block_size > 0, "kv_events is claimed with a block_size of 0.")
    if card.block_size:
        expect(card.hash_scheme == HASH_SCHEME, f"hash_scheme is {card.hash_scheme!r}, not {HASH_SCHEME!r}.")
        expect(card.total_blocks > 0, "block_size is set but total_blocks is 0, which leaves the index unbounded.")


@rule(
    "tokenizer-files",
    "GetTokenizer streams complete files whose content matches the fingerprint on the card.",
    "worker.proto, TokenizerChunk; common.proto, TokenizerSpec.fingerprint",
    generates=False,
)
async def tokenizer_files(subject: Subject) -> str:
    wanted = subject.card.tokenizer.fingerprint
    if not wanted:
        raise NotClaimed("The card has no tokenizer fingerprint.")
    with tempfile.TemporaryDirectory(prefix="sluice-conformance-") as folder:
        files = await fetch_tokenizer(subject, Path(folder))
        # The store names a tokenizer's folder by its verified fingerprint.
        expect(wanted in files.parts, f"The files have another fingerprint than the card's {wanted[:12]}….")
        names = sorted(path.name for path in files.rglob("*")) if files.is_dir() else [files.name]
    return f"{', '.join(names)} match {wanted[:12]}…."


@rule(
    "info-under-load",
    "GetInfo responds within a second while 32 generations are running.",
    "worker.proto, GetInfo: schedulers and probes call it at any time",
)
async def info_under_load(subject: Subject) -> str:
    timeout_s = subject.patience.answer_s / 10
    async with subject.session() as caller:
        running = await caller.start(*(subject.long() for _ in range(32)))
        await caller.wait_begun(running[0])
        for _ in range(5):
            try:
                await subject.stub.GetInfo(worker_pb2.GetInfoRequest(), timeout=timeout_s)
            except grpc.aio.AioRpcError as error:
                late = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
                expect(not late, f"No response within {timeout_s:g} s.")
                raise
    return f"Five responses, each within {timeout_s:g} s."
