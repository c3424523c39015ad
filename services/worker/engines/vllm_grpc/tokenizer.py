"""Fetches the tokenizer's files from a server whose model folder is not available locally."""

from __future__ import annotations

import asyncio
import hashlib
import io
import zipfile
import zlib
from pathlib import Path

import grpc

from services.common.base.errors import internal
from services.worker.engines.vllm_grpc.client import Client, error_of

MAX_BYTES = 256 << 20
"""Bytes of the tokenizer of vLLM's server; with a larger one the worker does not start."""
MAX_FILES = 256
"""Files of the tokenizer of vLLM's server; with more the worker does not start."""
FETCH_S = 300.0


async def fetch(client: Client) -> bytes:
    """Returns the tokenizer's zip archive after verifying its SHA-256.

    Raises:
        SluiceError: When the server has no tokenizer, or the archive is too large or damaged.
    """
    data, declared = bytearray(), ""
    try:
        async for chunk in client.tokenizer(FETCH_S):
            data += chunk.data
            declared = chunk.sha256 or declared
            if len(data) > MAX_BYTES:
                raise internal(f"vLLM's tokenizer is larger than {MAX_BYTES >> 20} MiB.")
    except grpc.aio.AioRpcError as error:
        raise error_of(error) from error
    if hashlib.sha256(data).hexdigest() != declared:
        raise internal(
            "The tokenizer from vLLM's server is incomplete or damaged; restart the worker to fetch it again."
        )
    return bytes(data)


def unpack(data: bytes, folder: Path) -> Path:
    """Extracts the files of an archive into one flat folder; raises SluiceError for an invalid archive."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            entries = [entry for entry in archive.infolist() if not entry.is_dir()]
            if len(entries) > MAX_FILES:
                raise internal(f"vLLM's tokenizer has more than {MAX_FILES} files.")
            if sum(entry.file_size for entry in entries) > MAX_BYTES:
                raise internal(f"vLLM's tokenizer is larger than {MAX_BYTES >> 20} MiB.")
            for entry in entries:
                (folder / Path(entry.filename).name).write_bytes(archive.read(entry))
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, OSError, ValueError) as error:
        raise internal("The tokenizer from vLLM's server is not a readable zip archive.") from error
    return folder


async def fetch_into(client: Client, folder: Path) -> Path:
    """Fetches and extracts the tokenizer's files; returns the folder."""
    return await asyncio.to_thread(unpack, await fetch(client), folder)
