"""The tokenizer's files of a server whose model folder is not here."""

from __future__ import annotations

import asyncio
import hashlib
import io
import zipfile
from pathlib import Path
from typing import Any

import grpc

from services.common.errors import internal
from services.worker.engines.vllm_grpc.client import Client, error_of

MOST_BYTES = 256 << 20


async def fetch(client: Client) -> bytes:
    """The zip archive, checked against its sha-256.

    Raises:
        SluiceError: the server has none, or what came is not what it meant to send.
    """
    data, declared = bytearray(), ""
    try:
        async for chunk in client.tokenizer():
            data += chunk.data
            declared = chunk.sha256 or declared
            if len(data) > MOST_BYTES:
                raise internal(f"vLLM's tokenizer is larger than {MOST_BYTES >> 20} MiB.")
    except grpc.aio.AioRpcError as error:
        raise error_of(error) from error
    if hashlib.sha256(data).hexdigest() != declared:
        raise internal("vLLM's tokenizer did not arrive whole.")
    return bytes(data)


def unpack(data: bytes, folder: Path) -> Path:
    """Writes the files of an archive side by side; SluiceError when it is none."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            entries = [entry for entry in archive.infolist() if not entry.is_dir()]
            if sum(entry.file_size for entry in entries) > MOST_BYTES:
                raise internal(f"vLLM's tokenizer is larger than {MOST_BYTES >> 20} MiB.")
            for entry in entries:
                _write(folder / Path(entry.filename).name, archive, entry)
    except zipfile.BadZipFile as error:
        raise internal("vLLM's tokenizer is no zip archive.") from error
    return folder


def _write(path: Path, archive: zipfile.ZipFile, entry: Any) -> None:
    path.write_bytes(archive.read(entry))


async def fetch_into(client: Client, folder: Path) -> Path:
    """Both of it."""
    return await asyncio.to_thread(unpack, await fetch(client), folder)
