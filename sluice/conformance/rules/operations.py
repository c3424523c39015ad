"""What operators and probes rely on."""

from __future__ import annotations

import asyncio

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from services.common.errors import ErrorKind
from services.common.net.addresses import listens_on_loopback
from sluice.conformance.heard import REASONS, ObservedStream
from sluice.conformance.rule import Broken, NotChecked, expect, rule
from sluice.conformance.subject import POLL_S, Subject
from sluice.v1 import common_pb2, worker_pb2

SERVICE = worker_pb2.DESCRIPTOR.services_by_name["Worker"].full_name
DRAINED_TOKENS = 200
SERVING = health_pb2.HealthCheckResponse.SERVING
ENDS = (REASONS.FINISH_REASON_STOP, REASONS.FINISH_REASON_LENGTH)
GONE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


@rule(
    "health",
    "grpc.health.v1 says SERVING for the server and for the Worker service.",
    "every gRPC server offers health",
    generates=False,
)
async def health(subject: Subject) -> str:
    for name in ("", SERVICE):
        status = await _health(subject, name)
        expect(status == SERVING, f"{name or 'The server'} is {_status_name(status)}.")
    return f"The server and {SERVICE} are SERVING."


@rule(
    "reflection",
    "Reflection lists the Worker service.",
    "a gRPC server that listens on loopback offers reflection",
    generates=False,
)
async def reflection(subject: Subject) -> str:
    stub = reflection_pb2_grpc.ServerReflectionStub(subject.channel)
    call = stub.ServerReflectionInfo(timeout=subject.patience.answer_s)
    try:
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        answer = await call.read()
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.UNIMPLEMENTED and not listens_on_loopback(subject.target.address):
            raise NotChecked("Reflection is off, as it is by default beyond loopback.") from error
        raise Broken(f"Reflection is off ({error.code().name}).") from error
    finally:
        call.cancel()
    expect(answer is not grpc.aio.EOF, "The reflection stream ended without an answer.")
    names = [service.name for service in answer.list_services_response.service]
    expect(SERVICE in names, f"{SERVICE} is not among {', '.join(names) or 'no services'}.")
    return f"{len(names)} services, {SERVICE} among them."


@rule(
    "load-returns",
    "When every request has ended, the engine's load is zero.",
    "common.proto, WorkerLoad: nothing leaks",
)
async def load_returns(subject: Subject) -> str:
    async with subject.session() as caller:
        await caller.ask(*(subject.request() for _ in range(8)))
    left = await subject.settles(lambda load: not _leftover(load))
    expect(not _leftover(left), f"Still there: {_leftover(left)}.")
    return "No running and no waiting request, no block held, no prompt token to compute."


def _leftover(load: common_pb2.WorkerLoad) -> str:
    names = ("running_requests", "waiting_requests", "used_blocks", "prefill_tokens")
    return ", ".join(f"{name} {getattr(load, name)}" for name in names if getattr(load, name))


@rule(
    "drain",
    "A worker that is told to stop leaves health, finishes what runs, and refuses the rest as retryable.",
    "shutdown order: leave discovery, grace, drain, cleanup, stop the server",
    disturbs=True,
)
async def drain(subject: Subject) -> str:
    stop = subject.target.stop
    if stop is None:
        raise NotChecked("The kit may not stop the worker: give --stop-command, such as 'kill PID'.")
    async with subject.session() as caller:
        (running,) = await caller.start(subject.endless(max_tokens=DRAINED_TOKENS))
        await caller.began(running)
        await stop()
        await _leaves_health(subject)
        while not running.terminals:
            try:
                late = await caller.ask_one(subject.request(max_tokens=1))
            except Broken:
                if running.terminals:  # the worker stops as soon as its last request has ended
                    break
                raise
            if late.reason == REASONS.FINISH_REASON_ERROR:
                _check_turned_away(late)
                break
        await caller.ended(running)
        expect(running.reason in ENDS, f"The running request ended with {running.describe()}.")
    refusal = await _later_request(subject)
    return f"The running request ended with {running.describe()}; then: {refusal}"


async def _leaves_health(subject: Subject) -> None:
    loop = asyncio.get_running_loop()
    until = loop.time() + subject.patience.settle_s
    while await _health(subject, SERVICE, gone=True) == SERVING:
        expect(loop.time() < until, f"It was SERVING {subject.patience.settle_s:g} s after it was told to stop.")
        await asyncio.sleep(POLL_S)


async def _later_request(subject: Subject) -> str:
    """How requests after the stop are turned away; none may be accepted for good."""
    loop = asyncio.get_running_loop()
    until = loop.time() + subject.patience.settle_s
    while loop.time() < until:
        try:
            heard = await subject.ask(subject.request(max_tokens=1))
        except Broken as gone:
            return f"{gone}"
        if heard.reason == REASONS.FINISH_REASON_ERROR:
            return _check_turned_away(heard)
        await asyncio.sleep(POLL_S)  # the grace period: what was routed here before the news spread
    raise Broken(f"Requests were still taken {subject.patience.settle_s:g} s after the worker was told to stop.")


def _check_turned_away(heard: ObservedStream) -> str:
    error = heard.terminal.error
    expect(
        int(error.kind) == ErrorKind.ENGINE_SHUTDOWN and error.retryable,
        f"A later request is refused with kind {error.kind}, retryable {error.retryable}: {error.message}",
    )
    return error.message


async def _health(subject: Subject, service: str, gone: bool = False) -> int:
    """The health status; 0 (UNKNOWN) when the server is gone and that is fine."""
    stub = health_pb2_grpc.HealthStub(subject.channel)
    try:
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=subject.patience.answer_s)
    except grpc.aio.AioRpcError as error:
        if gone and error.code() in GONE:
            return 0
        raise Broken(f"Health of {service or 'the server'} cannot be asked ({error.code().name}).") from error
    return int(answer.status)


def _status_name(status: int) -> str:
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(status))
