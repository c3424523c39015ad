"""Process of the stages that are not built in: `… -m services.router.scheduling.policies.isolated.child LIMITS`.

Its first frame has the compositions; every later one is a call. It has neither the router's state nor its environment.
"""

from __future__ import annotations

import json
import sys
import traceback
from functools import partial

from services.common.child_rpc.child import Channel, ChildLimits, serve
from services.router.scheduling.policies.composition import StageFailed, StagePipelines
from services.router.scheduling.policies.isolated.wire import (
    pack_failure,
    pack_ranking,
    unpack_call,
    unpack_compositions,
)


def handle(pipelines: StagePipelines, message: bytes) -> bytes:
    """Returns the reply to a call."""
    try:
        return pack_ranking(pipelines.rank(*unpack_call(message)))
    except StageFailed as error:
        if error.__cause__ is not None:
            traceback.print_exception(error.__cause__)
        return pack_failure(str(error))
    except Exception as error:
        traceback.print_exc()
        return pack_failure(f"{type(error).__name__}: {error}")


def main(argument: str) -> None:
    """Runs until the router closes the connection."""
    channel = Channel.of_stdio()
    compositions = unpack_compositions(channel.receive() or b"[]")
    try:
        pipelines = StagePipelines(compositions)
    except ValueError as error:
        channel.send(json.dumps({"error": str(error)}).encode())
        return
    limits = ChildLimits.read(argument)
    limits.apply()
    channel.send(b"{}")
    serve(channel, partial(handle, pipelines), limits.alarm_s)


if __name__ == "__main__":
    main(*sys.argv[1:])
