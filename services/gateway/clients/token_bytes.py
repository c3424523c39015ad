"""The bytes of single tokens, for showing tokens that a model did not choose. Kept: they never change."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from services.common.packing import pack_u32
from services.common.rpc.replicas import ReplicaSet
from services.gateway.clients.postprocess_link import split_pieces
from sluice.v1 import postprocess_pb2, postprocess_pb2_grpc

TIMEOUT_S = 10.0
MAX_ASKED = 32_768
MAX_MODELS = 256


class TokenPieces:
    """Asks whichever postprocess replica has the least to do, each id of a model once."""

    def __init__(self, replicas: ReplicaSet[postprocess_pb2_grpc.PostprocessAsyncStub]) -> None:
        self._replicas = replicas
        self._known: dict[str, dict[int, bytes]] = {}
        self._asking: dict[str, asyncio.Lock] = {}

    def of(self, model: str) -> dict[int, bytes]:
        """What is known of a model, by id."""
        known = self._known.get(model)
        if known is None:
            if len(self._known) >= MAX_MODELS:
                self._known.clear()
                self._asking.clear()
            known = self._known[model] = {}
        return known

    def forget(self, model: str) -> None:
        """Drops what is known of a model that is not served any more."""
        self._known.pop(model, None)
        self._asking.pop(model, None)

    async def learn(self, model: str, token_ids: Iterable[int]) -> None:
        """Makes these ids known; what many streams ask for at once is asked once.

        Raises:
            SluiceError: as postprocess says, INVALID_ARGUMENT for an id that its vocabulary does not have.
        """
        wanted = set(token_ids)
        async with self._asking.setdefault(model, asyncio.Lock()):
            known = self.of(model)
            missing = sorted(wanted - known.keys())
            for first in range(0, len(missing), MAX_ASKED):
                some = missing[first : first + MAX_ASKED]
                request = postprocess_pb2.TokenPiecesRequest(model=model, token_ids=pack_u32(some))
                answer = await self._replicas.call(lambda stub: stub.TokenPieces, request, TIMEOUT_S)
                known.update(zip(some, split_pieces(answer.lengths, answer.pieces), strict=True))
