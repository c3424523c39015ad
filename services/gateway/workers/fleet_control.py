"""Runs control actions on all workers of a model, and keeps LoRA adapters loaded on workers that start later."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping

import grpc

from services.common.errors import ErrorKind, SluiceError, not_found, quoted
from services.common.rpc.channels import open_channel
from services.common.rpc.errors import from_rpc_error
from services.gateway.workers.registry import WorkerEntry, WorkerRegistry
from sluice.v1 import worker_pb2, worker_pb2_grpc

log = logging.getLogger(__name__)

ACTION_S = 310.0  # a little longer than the worker's own limit
CHECK_EVERY_S = 2.0
MOST_AT_ONCE = 16
MOST_ADAPTERS = 1_024  # kept loaded, over all models

_Action = worker_pb2.ControlRequest


class FleetControl:
    """Controls the workers of a model together.

    Workers that sleep are not in the registry; they are remembered here, so that the gateway that put them to sleep can
    wake them.
    """

    def __init__(self, registry: WorkerRegistry, credentials: grpc.ChannelCredentials | None) -> None:
        self._registry = registry
        self._credentials = credentials
        self._asleep: dict[str, WorkerEntry] = {}
        self._adapters: dict[tuple[str, str], str] = {}  # (model, adapter) → path

    async def load_adapter(self, model: str, name: str, path: str) -> list[str]:
        """Loads a LoRA adapter on all workers of a model, also on those that start later; returns the workers' ids.

        Args:
            path: of the adapter's files as the workers see them; empty if the engine finds them by name.

        Raises:
            SluiceError: as the registry for an unknown model, and as the workers that fail.
        """
        entries = self._workers(model)
        if len(self._adapters) >= MOST_ADAPTERS and (model, name) not in self._adapters:
            raise SluiceError(
                ErrorKind.FAILED_PRECONDITION, f"{MOST_ADAPTERS} adapters are kept loaded already; unload one."
            )
        arguments = {"name": name, **({"path": path} if path else {})}
        without = [entry for entry in entries if name not in entry.adapters]
        await self._on_all(without, _Action.ACTION_LOAD_LORA, arguments)
        self._adapters[model, name] = path
        return [entry.worker_id for entry in entries]

    async def unload_adapter(self, model: str, name: str) -> list[str]:
        """Unloads a LoRA adapter from all workers that have it; returns their ids.

        Raises:
            SluiceError: NOT_FOUND if none has it, and as the workers that fail.
        """
        holders = [entry for entry in self._workers(model) if name in entry.adapters]
        if self._adapters.pop((model, name), None) is None and not holders:
            raise not_found(f"LoRA adapter {quoted(name)} is not loaded.", param="lora_name", code="adapter_not_found")
        await self._on_all(holders, _Action.ACTION_UNLOAD_LORA, {"name": name})
        return [entry.worker_id for entry in holders]

    async def sleep(self, model: str, level: int) -> list[str]:
        """Puts all workers of a model to sleep once they are idle; returns their ids."""
        entries = self._workers(model)
        await self._on_all(entries, _Action.ACTION_SLEEP, {"level": str(level)})
        self._asleep |= {entry.worker_id: entry for entry in entries}
        return [entry.worker_id for entry in entries]

    async def wake(self, model: str) -> list[str]:
        """Wakes the workers of a model that this gateway has put to sleep; returns their ids."""
        entries = [entry for entry in self._asleep.values() if entry.model == model]
        await self._on_all(entries, _Action.ACTION_WAKE, {})
        for entry in entries:
            self._asleep.pop(entry.worker_id, None)
        return [entry.worker_id for entry in entries]

    def only_asleep(self) -> str:
        """Returns the model whose workers sleep; raises SluiceError unless there is exactly one."""
        models = {entry.model for entry in self._asleep.values()}
        if len(models) != 1:
            raise SluiceError(
                ErrorKind.FAILED_PRECONDITION,
                "Workers of several models sleep; send model."
                if models
                else "This gateway has put no worker to sleep.",
                param="model",
            )
        return models.pop()

    async def reset_prefix_cache(self, model: str) -> list[str]:
        """Clears the prefix caches of all workers of a model; returns their ids."""
        entries = self._workers(model)
        await self._on_all(entries, _Action.ACTION_CLEAR_CACHE, {})
        return [entry.worker_id for entry in entries]

    async def keep_adapters(self) -> None:
        """Loads the adapters on workers that lack them, until cancelled."""
        while True:
            await asyncio.sleep(CHECK_EVERY_S)
            for (model, name), path in list(self._adapters.items()):
                without = [
                    entry
                    for entry in self._registry.workers.values()
                    if entry.model == model and name not in entry.adapters
                ]
                try:
                    arguments = {"name": name, **({"path": path} if path else {})}
                    await self._on_all(without, _Action.ACTION_LOAD_LORA, arguments)
                except SluiceError as error:
                    log.warning("loading an adapter failed: %s", error.message, extra={"adapter": name})

    def _workers(self, model: str) -> list[WorkerEntry]:
        base = self._registry.model(model).model
        return [entry for entry in self._registry.workers.values() if entry.model == base]

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

    async def _run(self, entry: WorkerEntry, action: _Action.Action.ValueType, arguments: Mapping[str, str]) -> None:
        channel = open_channel(entry.address, self._credentials, callee=f"worker/{entry.worker_id}")
        try:
            request = worker_pb2.ControlRequest(action=action, arguments=arguments)
            await worker_pb2_grpc.WorkerStub(channel).Control(request, timeout=ACTION_S)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, f"worker {entry.worker_id}") from error
        finally:
            await channel.close()
