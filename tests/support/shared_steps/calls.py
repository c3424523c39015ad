"""Rigs of the unary calls that share one stream, on both of its sides."""

from __future__ import annotations

import asyncio
from typing import Any, cast
from unittest import mock

import grpc

from services.common.rpc import multiplexed_call
from services.common.rpc.call_server import MultiplexedCallServer
from services.common.rpc.errors import from_detail, from_rpc_error
from services.common.rpc.multiplexed_call import MultiplexedCall
from sluice.v1 import preprocess_pb2
from tests.support.shared_steps.rigs import ROWS, Fault, Outcome, rig


class _Metadata(dict[str, str]):
    """Metadata of a call that cannot be read when the fault is due."""

    def __init__(self, fault: Fault, row: int) -> None:
        super().__init__(row=str(row))
        self._fault, self._row = fault, row

    def items(self) -> Any:
        self._fault.at(self._row)
        return super().items()


class _Call:
    def __init__(self, fault: Fault, number: int) -> None:
        self.number = number
        self.metadata = _Metadata(fault, number)


class _Calls:
    def __init__(self, calls: list[_Call]) -> None:
        self.calls = calls
        self.cancels = b""


@rig("calls.serve")
async def serve(fault: Fault) -> Outcome:
    outcome = Outcome()

    async def handle(call: _Call, metadata: Any) -> Any:
        fault.at(call.number)
        await asyncio.sleep(0)
        fault.at(call.number)
        # A response that its message does not hold, when the fault is due.
        return {"response": "response" if not fault.due(call.number) else "\ud801"}

    def make_answer(**fields: Any) -> Any:
        if "response" in fields:
            fields["response"] = preprocess_pb2.TokenizeResponse(hash_scheme=fields["response"])
        return preprocess_pb2.TokenizeAnswer(**fields)

    server: MultiplexedCallServer = MultiplexedCallServer(handle, make_answer, preprocess_pb2.TokenizeAnswers)
    server._writer = cast(Any, mock.Mock())
    calls = [_Call(fault, row) for row in range(ROWS)]
    if fault.due(ROWS // 2):  # a caller that uses the number of a call in progress again
        calls.append(calls[ROWS // 2])
    server._on_message(_Calls(calls))
    await server._all_completed()
    server._on_message(_Calls([_Call(Fault(), ROWS)]))
    await server._all_completed()
    while len(answers := cast(Any, server._drain()).answers if server._ready else ()):
        for answer in answers:
            assert answer.number not in outcome.outputs | outcome.errors, "a call ends once"
            if answer.HasField("error"):
                outcome.errors[answer.number] = from_detail(answer.error)
            else:
                outcome.outputs[answer.number] = answer.response.hash_scheme
    outcome.alive = outcome.outputs.pop(ROWS, "") == "response"
    return outcome


@rig("calls.receive")
async def receive(fault: Fault) -> Outcome:
    class Session:
        def wake(self) -> None:
            pass

        def close(self) -> None:
            raise AssertionError("the session goes on")

    def settle(pending: asyncio.Future[Any], answer: Any, response: str) -> None:
        fault.at(answer.number - 1)
        original(pending, answer, response)

    original = multiplexed_call._settle
    shared: MultiplexedCall[Any, Any] = MultiplexedCall(
        "peer", cast(Any, None), cast(Any, None), preprocess_pb2.TokenizeCall, preprocess_pb2.TokenizeCalls
    )
    shared._session, shared._announced = cast(Any, Session()), preprocess_pb2.TokenizeAnswers()
    shared.welcome(True)
    outcome = Outcome()

    async def call(row: int) -> None:
        try:
            response = await shared(preprocess_pb2.TokenizeRequest(), timeout=5)
        except grpc.aio.AioRpcError as error:
            outcome.errors[row] = from_rpc_error(error, "peer")
        else:
            outcome.outputs[row] = response.hash_scheme

    with mock.patch.object(multiplexed_call, "_settle", settle):
        for rows in (range(ROWS), range(ROWS, ROWS + 1)):
            tasks = [asyncio.ensure_future(call(row)) for row in rows]
            await asyncio.sleep(0)
            answers = [
                preprocess_pb2.TokenizeAnswer(
                    number=row + 1, response=preprocess_pb2.TokenizeResponse(hash_scheme=f"response {row}")
                )
                for row in rows
            ]
            shared._on_message(preprocess_pb2.TokenizeAnswers(answers=answers))
            await asyncio.gather(*tasks)
    outcome.alive = outcome.outputs.pop(ROWS, "") == f"response {ROWS}"
    return outcome
