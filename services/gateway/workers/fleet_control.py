"""Runs control actions on all workers of a model, and keeps LoRA adapters loaded on workers that start later."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import grpc

from services.common.errors import ErrorKind, SluiceError, not_found, quoted
from services.common.rpc.channels import open_channel
from services.common.rpc.errors import from_rpc_error
from services.gateway.workers.fleet_store import FleetStore, Kind
from services.gateway.workers.registry import WorkerEntry, WorkerRegistry
from sluice.v1 import worker_pb2, worker_pb2_grpc

log = logging.getLogger(__name__)

ACTION_S = 310.0  # a little longer than the worker's own limit
CHECK_EVERY_S = 2.0
MOST_AT_ONCE = 16
ADAPTERS: Kind = "adapters"
ASLEEP: Kind = "asleep"

_Action = worker_pb2.ControlRequest
_SEPARATOR = "\n"  # in no name: names are printable


class _Sleeper(NamedTuple):
    worker_id: str
    model: str
    address: str


class FleetControl:
    """Controls the workers of a model together.

    Workers that sleep are not in the registry; the store has their addresses, so that a gateway can wake them.

    Args:
        store: what to keep loaded and what sleeps, shared with the other gateways.
    """

    def __init__(
        self, registry: WorkerRegistry, credentials: grpc.ChannelCredentials | None, store: FleetStore
    ) -> None:
        self._registry = registry
        self._credentials = credentials
        self._store = store

    async def load_adapter(self, model: str, name: str, path: str) -> list[str]:
        """Loads a LoRA adapter on all workers of a model, also on those that start later; returns the workers' ids.

        Args:
            path: of the adapter's files as the workers see them; empty if the engine finds them by name.

        Raises:
            SluiceError: as the registry for an unknown model, as the store, and as the workers that fail.
        """
        base = self._registry.model(model).model
        entries = self._workers(base)
        await self._on_all([entry for entry in entries if name not in entry.adapters], *_loading(name, path))
        await self._store.put(ADAPTERS, _name(base, name), path)
        return [entry.worker_id for entry in entries]

    async def unload_adapter(self, model: str, name: str) -> list[str]:
        """Unloads a LoRA adapter from all workers that have it; returns their ids.

        Raises:
            SluiceError: NOT_FOUND if none has it, and as the workers that fail.
        """
        base = self._registry.model(model).model
        kept = await self._store.remove(ADAPTERS, _name(base, name))
        holders = [entry for entry in self._workers(base) if name in entry.adapters]
        if not kept and not holders:
            raise not_found(f"LoRA adapter {quoted(name)} is not loaded.", param="lora_name", code="adapter_not_found")
        await self._on_all(holders, _Action.ACTION_UNLOAD_LORA, {"name": name})
        return [entry.worker_id for entry in holders]

    async def sleep(self, model: str, level: int) -> list[str]:
        """Puts all workers of a model to sleep once they are idle; returns their ids."""
        base = self._registry.model(model).model
        entries = self._workers(base)
        for entry in entries:  # before they sleep: otherwise a gateway that ends now leaves them asleep for good
            await self._store.put(ASLEEP, entry.worker_id, _name(base, entry.address))
        await self._on_all(entries, _Action.ACTION_SLEEP, {"level": str(level)})
        return [entry.worker_id for entry in entries]

    async def wake(self, model: str) -> list[str]:
        """Wakes the workers of a model that sleep, but for those that cannot be reached; returns their ids."""
        asleep = [sleeper for sleeper in await self._asleep() if sleeper.model == model]
        woken = []
        for sleeper in asleep:
            if await self._wakes(sleeper):
                woken.append(sleeper.worker_id)
            await self._store.remove(ASLEEP, sleeper.worker_id)
        return woken

    async def only_asleep(self) -> str:
        """Returns the model whose workers sleep; raises SluiceError unless there is exactly one."""
        models = {sleeper.model for sleeper in await self._asleep()}
        if len(models) != 1:
            raise SluiceError(
                ErrorKind.FAILED_PRECONDITION,
                "Workers of several models sleep; send model." if models else "No gateway has put a worker to sleep.",
                param="model",
            )
        return models.pop()

    async def reset_prefix_cache(self, model: str) -> list[str]:
        """Clears the prefix caches of all workers of a model; returns their ids."""
        entries = self._workers(self._registry.model(model).model)
        await self._on_all(entries, _Action.ACTION_CLEAR_CACHE, {})
        return [entry.worker_id for entry in entries]

    async def keep_adapters(self) -> None:
        """Loads the adapters on workers that lack them, until cancelled."""
        while True:
            await asyncio.sleep(CHECK_EVERY_S)
            try:
                await self._load_missing()
            except SluiceError as error:
                log.warning("keeping adapters loaded failed: %s", error.message)

    async def _load_missing(self) -> None:
        for key, path in (await self._store.all(ADAPTERS)).items():
            model, _, name = key.partition(_SEPARATOR)
            without = [entry for entry in self._workers(model) if name not in entry.adapters]
            try:
                await self._on_all(without, *_loading(name, path))
            except SluiceError as error:
                log.warning("loading an adapter failed: %s", error.message, extra={"adapter": name})

    def _workers(self, model: str) -> list[WorkerEntry]:
        return [entry for entry in self._registry.workers.values() if entry.model == model]

    async def _asleep(self) -> list[_Sleeper]:
        stored = await self._store.all(ASLEEP)
        return [
            _Sleeper(worker_id, *value.split(_SEPARATOR, 1))
            for worker_id, value in stored.items()
            if _SEPARATOR in value
        ]

    async def _wakes(self, sleeper: _Sleeper) -> bool:
        """Returns whether the worker could be reached; raises SluiceError if it does not wake."""
        try:
            await self._run(sleeper, _Action.ACTION_WAKE, {})
        except SluiceError as error:
            if error.kind not in (ErrorKind.CANNOT_CONNECT, ErrorKind.CONNECTION_TIMEOUT, ErrorKind.UNAVAILABLE):
                raise
            log.warning("a worker that slept is gone: %s", error.message, extra={"worker": sleeper.worker_id})
            return False
        return True

    async def _on_all(
        self, entries: Iterable[WorkerEntry], action: _Action.Action.ValueType, arguments: Mapping[str, str]
    ) -> None:
        """Runs an action on workers concurrently; raises the first failure once all have returned."""
        gate = asyncio.Semaphore(MOST_AT_ONCE)

        async def run(entry: WorkerEntry) -> None:
            async with gate:
                await self._run(entry, action, arguments)

        results = await asyncio.gather(*map(run, entries), return_exceptions=True)
        failed = [result for result in results if isinstance(result, BaseException)]
        for failure in failed:
            if not isinstance(failure, SluiceError):
                raise failure
        if failed:
            first = failed[0]
            assert isinstance(first, SluiceError)
            message = f"{len(failed)} of {len(results)} workers failed: {first.message}"
            raise SluiceError(first.kind, message, code=first.code)

    async def _run(
        self, entry: WorkerEntry | _Sleeper, action: _Action.Action.ValueType, arguments: Mapping[str, str]
    ) -> None:
        channel = open_channel(entry.address, self._credentials, callee=f"worker/{entry.worker_id}")
        try:
            request = worker_pb2.ControlRequest(action=action, arguments=arguments)
            await worker_pb2_grpc.WorkerStub(channel).Control(request, timeout=ACTION_S)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, f"worker {entry.worker_id}") from error
        finally:
            await channel.close()


def _name(model: str, rest: str) -> str:
    return f"{model}{_SEPARATOR}{rest}"


def _loading(name: str, path: str) -> tuple[_Action.Action.ValueType, dict[str, str]]:
    return _Action.ACTION_LOAD_LORA, {"name": name, **({"path": path} if path else {})}
