"""Bytes of single tokens, for log-probability alternatives; cached, because they never change."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from services.common.base.packing import pack_u32
from services.common.rpc.replicas import ReplicaSet
from services.gateway.backends.rpc.postprocess_link import split_pieces
from sluice.v1 import postprocess_pb2, postprocess_pb2_grpc

TIMEOUT_S = 10.0
MAX_IDS_PER_CALL = 32_768
"""Token ids in one call for their texts."""
MAX_MODELS = 256
"""Models whose tokens' texts are remembered; beyond it all are forgotten, and requested again."""


class TokenPieces:
    """Caches the bytes of tokens by model, and fetches missing ones from a postprocess replica."""

    def __init__(self, replicas: ReplicaSet[postprocess_pb2_grpc.PostprocessAsyncStub]) -> None:
        self._replicas = replicas
        self._pieces: dict[str, dict[int, bytes]] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    def of(self, model: str) -> dict[int, bytes]:
        """Returns the cached bytes of a model's tokens, by id."""
        pieces = self._pieces.get(model)
        if pieces is None:
            if len(self._pieces) >= MAX_MODELS:
                self._pieces.clear()
                self._locks.clear()
            pieces = self._pieces[model] = {}
        return pieces

    def forget(self, model: str) -> None:
        """Drops the cache of a model that is no longer served."""
        self._pieces.pop(model, None)
        self._locks.pop(model, None)

    async def learn(self, model: str, token_ids: Iterable[int]) -> None:
        """Fetches the bytes of ids that are not cached; concurrent requests for the same ids share a call.

        Raises:
            SluiceError: as postprocess, with INVALID_ARGUMENT for an id outside the vocabulary.
        """
        requested = set(token_ids)
        async with self._locks.setdefault(model, asyncio.Lock()):
            pieces = self.of(model)
            missing = sorted(requested - pieces.keys())
            for first in range(0, len(missing), MAX_IDS_PER_CALL):
                batch = missing[first : first + MAX_IDS_PER_CALL]
                request = postprocess_pb2.TokenPiecesRequest(model=model, token_ids=pack_u32(batch))
                response = await self._replicas.call(lambda stub: stub.TokenPieces, request, TIMEOUT_S)
                pieces.update(zip(batch, split_pieces(response.lengths, response.pieces), strict=True))
