"""Process of the stages that are not built in: `… -m services.router.scheduling.policies.isolated.child LIMITS`.

Its first frame has the compositions; every later one is a call. It has neither the router's state nor its environment.
"""

from __future__ import annotations

import json
import sys
import traceback

from services.common.child_rpc.child import Channel, ChildLimits, serve
from services.router.scheduling.policies.composition import Composition, StageFailed, StagePipeline
from services.router.scheduling.policies.isolated.wire import (
    pack_failure,
    pack_ranking,
    unpack_call,
    unpack_compositions,
)

MAX_PIPELINES = 4096
"""Pipelines of policies, models and parts that are kept; with one more, all of them start anew."""


class PolicyPipelines:
    """A pipeline for each policy, model and part, because pickers may have state.

    Raises:
        ValueError: a stage cannot be made.
    """

    def __init__(self, compositions: list[Composition]) -> None:
        self._compositions = {composition.name: composition for composition in compositions}
        for composition in compositions:
            StagePipeline(composition)
        self._made: dict[tuple[str, str, str], StagePipeline] = {}

    def handle(self, message: bytes) -> bytes:
        """Returns the reply to a call."""
        try:
            call = unpack_call(message)
            key = (call.policy, call.request.model, call.request.part)
            pipeline = self._made.get(key)
            if pipeline is None:
                if len(self._made) >= MAX_PIPELINES:
                    self._made.clear()
                pipeline = self._made[key] = StagePipeline(self._compositions[call.policy])
            return pack_ranking(pipeline.rank(call.request, call.candidates))
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
        pipelines = PolicyPipelines(compositions)
    except ValueError as error:
        channel.send(json.dumps({"error": str(error)}).encode())
        return
    limits = ChildLimits.read(argument)
    limits.apply()
    channel.send(b"{}")
    serve(channel, pipelines.handle, limits.alarm_s)


if __name__ == "__main__":
    main(*sys.argv[1:])
