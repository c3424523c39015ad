"""Starts the worker service: ``python -m services.worker``."""

from __future__ import annotations

from services.common.base.tasks import Stop
from services.common.rpc.runner import run
from services.worker.server import WorkerServer
from services.worker.settings import WorkerSettings


async def serve(settings: WorkerSettings, stop: Stop) -> None:
    """Serves until `stop` is set, then shuts down gracefully."""
    server = WorkerServer(settings, stop)
    try:
        if await stop.unless_set(server.start()):
            await stop.wait()
    finally:
        await server.shut_down()


def main() -> None:
    """Reads the settings and runs the worker until it receives a stop signal."""
    settings = WorkerSettings.load()
    run("worker", settings, lambda stop: serve(settings, stop))


if __name__ == "__main__":
    main()
