"""Converts a worker's token ids to text with the tokenizer files that the worker serves."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from services.common.base.errors import SluiceError
from services.common.discovery.tokenizer_store import TokenizerStore
from services.common.packages.model_files import ModelSpec
from sluice.conformance.exceptions import NotChecked
from sluice.conformance.subject import Subject
from sluice.v1 import worker_pb2

Reader = Callable[[Sequence[int]], str]


async def fetch_tokenizer(subject: Subject, folder: Path) -> Path:
    """Downloads the tokenizer files into a folder and verifies their fingerprint.

    Raises:
        SluiceError: a file or the fingerprint does not match.
        grpc.aio.AioRpcError: the worker does not serve its tokenizer.
    """
    store = TokenizerStore(folder)
    incoming = None
    try:
        async for chunk in subject.stub.GetTokenizer(
            worker_pb2.GetTokenizerRequest(), timeout=subject.patience.generation_s
        ):
            incoming = incoming or store.receive(chunk.fingerprint)
            incoming.add(chunk.file_name, chunk.file_size, chunk.data)
        incoming = incoming or store.receive("")
        return await asyncio.to_thread(incoming.keep)
    except BaseException:
        if incoming is not None:
            incoming.drop()
        raise


async def text_reader(subject: Subject) -> Reader:
    """Returns a function from ids to text without special tokens; raises NotChecked when the files cannot be read."""
    try:
        from services.postprocess.streams.vocabulary_registry import load
    except ImportError as error:
        raise NotChecked(f"Decoding text requires the package {error.name}; install sluice-llm[worker].") from error
    with tempfile.TemporaryDirectory(prefix="sluice-conformance-") as folder:
        try:
            files = await fetch_tokenizer(subject, Path(folder))
            vocabulary = await asyncio.to_thread(load, ModelSpec("conformance", str(files)))
        except SluiceError as error:
            raise NotChecked(f"The output cannot be decoded to text: {error.message}") from error

    def read(token_ids: Sequence[int]) -> str:
        detokenizer = vocabulary.detokenizer(True)
        return "".join(map(detokenizer.step, token_ids)) + detokenizer.flush()

    return read
