"""Runs control actions on all workers of a model, and keeps LoRA adapters loaded on workers that start later."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

import grpc

from services.common.base.errors import ErrorKind, SluiceError, no_answer, not_found, quoted, unavailable
from services.common.rpc.channels import FOREIGN_KEEPALIVE_MS, open_channel
from services.common.rpc.errors import from_rpc_error
from services.gateway.backends.workers.fleet_store import FleetStore, Kind
from services.gateway.backends.workers.registry import WorkerEntry, WorkerRegistry
from sluice.v1 import worker_pb2, worker_pb2_grpc

log = logging.getLogger(__name__)

ACTION_S = 310.0  # a little longer than the worker's own limit
CHECK_EVERY_S = 2.0
CONNECT_S = 10.0
LISTED_S = 10.0  # after a worker has changed its adapters, until this gateway's list has them
POLL_S = 0.02
MAX_AT_ONCE = 16
"""Workers on which an operator's command runs at the same time; the others wait."""
LOADED, NOT_LOADED, UNSUPPORTED = "adapter_loaded", "adapter_not_found", "unsupported_by_engine"
"""Error codes of workers."""
ADAPTERS: Kind = "adapters"
ASLEEP: Kind = "asleep"

_Action = worker_pb2.ControlRequest
_SEPARATOR = "\n"  # in no name: names are printable


class _Sleeper(NamedTuple):
    worker_id: str
    model: str
    address: str
    keepalive_ms: int = FOREIGN_KEEPALIVE_MS


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
            SluiceError: as the registry for an unknown model, as the store, and as the workers that fail; UNAVAILABLE
                if requests cannot name the adapter yet.
        """
        base = self._registry.model(model).model
        entries = self._workers(base)
        await self._on_all(entries, *_loading(name, path), passed=(LOADED,))
        await self._store.put(ADAPTERS, _name(base, name), path)
        if not await self._listed(entries, name, loaded=True):
            raise unavailable(
                f"LoRA adapter {quoted(name)} is loaded, but this gateway has not heard of it from its router yet; try "
                "again later.",
                code="adapter_not_listed",
            )
        return [entry.worker_id for entry in entries]

    async def unload_adapter(self, model: str, name: str) -> list[str]:
        """Unloads a LoRA adapter from all workers that have it; returns their ids.

        Raises:
            SluiceError: NOT_FOUND if none has it, and as the workers that fail.
        """
        base = self._registry.model(model).model
        kept = await self._store.remove(ADAPTERS, _name(base, name))
        # All workers are asked: what this gateway knows of their adapters may be older than the last load.
        entries = self._workers(base)
        unloaded = await self._on_all(
            entries, _Action.ACTION_UNLOAD_LORA, {"name": name}, passed=(NOT_LOADED, UNSUPPORTED)
        )
        if not kept and not unloaded:
            raise not_found(f"LoRA adapter {quoted(name)} is not loaded.", param="lora_name", code=NOT_LOADED)
        await self._listed(entries, name, loaded=False)
        return unloaded

    async def _listed(self, entries: Iterable[WorkerEntry], name: str, loaded: bool) -> bool:
        """Waits until this gateway's list of workers has a change of their adapters; returns whether it has."""
        workers, ids = self._registry.workers, [entry.worker_id for entry in entries]
        for _ in range(round(LISTED_S / POLL_S)):
            current = [workers[worker_id] for worker_id in ids if worker_id in workers]
            if all((name in entry.adapters) == loaded for entry in current):
                return True
            await asyncio.sleep(POLL_S)
        return False

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
                await self._on_all(without, *_loading(name, path), passed=(LOADED,))
            except SluiceError as error:
                log.warning("loading an adapter failed: %s", error.message, extra={"adapter": name})

    def _workers(self, model: str) -> list[WorkerEntry]:
        return [entry for entry in self._registry.workers.values() if entry.model == model]

    async def _asleep(self) -> list[_Sleeper]:
        stored = await self._store.all(ASLEEP)
        parted = ((worker_id, *value.partition(_SEPARATOR)) for worker_id, value in stored.items())
        return [_Sleeper(worker_id, model, address) for worker_id, model, separator, address in parted if separator]

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
        self,
        entries: Iterable[WorkerEntry],
        action: _Action.Action.ValueType,
        arguments: Mapping[str, str],
        passed: Collection[str] = (),
    ) -> list[str]:
        """Runs an action on workers concurrently; raises the first failure once all have returned.

        Args:
            passed: codes of the errors of workers that need nothing done.

        Returns:
            The ids of the workers that ran it.
        """
        gate = asyncio.Semaphore(MAX_AT_ONCE)

        async def run(entry: WorkerEntry) -> str:
            async with gate:
                try:
                    await self._run(entry, action, arguments)
                except SluiceError as error:
                    if error.code in passed:
                        return ""
                    raise
                return entry.worker_id

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
        return [result for result in results if isinstance(result, str) and result]

    async def _run(
        self, entry: WorkerEntry | _Sleeper, action: _Action.Action.ValueType, arguments: Mapping[str, str]
    ) -> None:
        callee = f"worker/{entry.worker_id}"
        channel = open_channel(entry.address, self._credentials, callee=callee, keepalive_ms=entry.keepalive_ms)
        try:
            async with asyncio.timeout(CONNECT_S):
                await channel.channel_ready()
            request = worker_pb2.ControlRequest(action=action, arguments=arguments)
            await worker_pb2_grpc.WorkerStub(channel).Control(request, timeout=ACTION_S)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, f"worker {entry.worker_id}") from error
        except TimeoutError:
            raise no_answer(f"The worker {entry.worker_id} cannot be reached.") from None
        finally:
            await channel.close()


def _name(model: str, rest: str) -> str:
    return f"{model}{_SEPARATOR}{rest}"


def _loading(name: str, path: str) -> tuple[_Action.Action.ValueType, dict[str, str]]:
    return _Action.ACTION_LOAD_LORA, {"name": name, **({"path": path} if path else {})}
