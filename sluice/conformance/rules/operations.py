"""Rules about health, reflection, load and shutdown."""

from __future__ import annotations

import asyncio

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from services.common.base.errors import ErrorKind
from services.common.net.addresses import listens_on_loopback
from sluice.conformance.caller import ConformanceClient
from sluice.conformance.exceptions import NotChecked, RuleFailed
from sluice.conformance.observed_stream import REASONS, ObservedStream
from sluice.conformance.rule import expect, rule
from sluice.conformance.subject import POLL_S, Subject
from sluice.v1 import common_pb2, worker_pb2

SERVICE = worker_pb2.DESCRIPTOR.services_by_name["Worker"].full_name
DRAINED_TOKENS = 200
STOP_S = 2.0
SERVING = health_pb2.HealthCheckResponse.SERVING
ENDS = (REASONS.FINISH_REASON_STOP, REASONS.FINISH_REASON_LENGTH)
STOPPED = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


@rule(
    "health",
    "grpc.health.v1 reports SERVING for the server and for the Worker service.",
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
            raise NotChecked(
                "Reflection is disabled, which is the default for other than loopback addresses."
            ) from error
        raise RuleFailed(f"Reflection is disabled ({error.code().name}).") from error
    finally:
        call.cancel()
    expect(answer is not grpc.aio.EOF, "The reflection stream ended without a response.")
    names = [service.name for service in answer.list_services_response.service]
    expect(SERVICE in names, f"{SERVICE} is not among {', '.join(names) or 'no services'}.")
    return f"{len(names)} services, including {SERVICE}."


@rule(
    "load-returns",
    "When every request has ended, the engine's load is zero.",
    "common.proto, WorkerLoad: nothing leaks",
)
async def load_returns(subject: Subject) -> str:
    async with subject.session() as caller:
        await caller.complete(*(subject.request() for _ in range(8)))
    load = await subject.wait_for_load(lambda load: not _leftover(load))
    expect(not _leftover(load), f"The load after all requests ended: {_leftover(load)}.")
    return "No running or waiting requests, no used blocks and no prefill tokens."


def _leftover(load: common_pb2.WorkerLoad) -> str:
    names = ("running_requests", "waiting_requests", "used_blocks", "prefill_tokens")
    return ", ".join(f"{name} {getattr(load, name)}" for name in names if getattr(load, name))


@rule(
    "drain",
    "A worker that receives a stop signal reports NOT_SERVING, completes running requests, and refuses new ones as "
    "retryable.",
    "shutdown order: leave discovery, grace, drain, cleanup, stop the server",
    disturbs=True,
)
async def drain(subject: Subject) -> str:
    stop = subject.target.stop
    if stop is None:
        raise NotChecked("The kit cannot stop the worker; set --stop-command, such as 'kill PID'.")
    async with subject.session() as caller:
        (running,) = await caller.start(subject.full_length(max_tokens=DRAINED_TOKENS))
        await caller.wait_begun(running)
        await stop()
        await _wait_not_serving(subject)
        while not running.terminals and not await _is_refused(subject, caller, running):
            pass
        await caller.wait_ended(running)
        expect(running.reason in ENDS, f"The running request ended with {running.describe()}.")
    refusal = await _later_request(subject)
    return f"The running request ended with {running.describe()}; then: {refusal}"


async def _is_refused(subject: Subject, caller: ConformanceClient, running: ObservedStream) -> bool:
    """Sends one request during the drain; returns whether the worker refused it or has stopped.

    The request has a session of its own: a write to a session that the worker closes would discard what the session has
    received but not read, such as the end of the running request.
    """
    try:
        async with subject.session() as other:
            late = await other.complete_one(subject.request(max_tokens=1))
    except RuleFailed as failure:
        try:
            await caller.wait_ended(running, within_s=STOP_S)  # the worker stops after its last request has ended
        except RuleFailed:
            raise failure from None
        return True
    if late.reason == REASONS.FINISH_REASON_ERROR:
        _check_shutdown_refusal(late)
        return True
    return False


async def _wait_not_serving(subject: Subject) -> None:
    loop = asyncio.get_running_loop()
    until = loop.time() + subject.patience.settle_s
    while await _health(subject, SERVICE, may_be_stopped=True) == SERVING:
        expect(
            loop.time() < until, f"The worker was still SERVING {subject.patience.settle_s:g} s after the stop signal."
        )
        await asyncio.sleep(POLL_S)


async def _later_request(subject: Subject) -> str:
    """Sends requests after the stop until one is refused; returns the error message."""
    loop = asyncio.get_running_loop()
    until = loop.time() + subject.patience.settle_s
    while loop.time() < until:
        try:
            stream = await subject.complete(subject.request(max_tokens=1))
        except RuleFailed as closed:
            return f"{closed}"
        if stream.reason == REASONS.FINISH_REASON_ERROR:
            return _check_shutdown_refusal(stream)
        await asyncio.sleep(POLL_S)  # requests routed before the departure are accepted during the grace period
    raise RuleFailed(f"Requests were still accepted {subject.patience.settle_s:g} s after the stop signal.")


def _check_shutdown_refusal(stream: ObservedStream) -> str:
    error = stream.terminal.error
    expect(
        int(error.kind) == ErrorKind.ENGINE_SHUTDOWN and error.retryable,
        f"A later request was refused with kind {error.kind}, retryable {error.retryable}: {error.message}",
    )
    return error.message


async def _health(subject: Subject, service: str, may_be_stopped: bool = False) -> int:
    """Returns the health status; 0 (UNKNOWN) when the server has stopped and may have."""
    stub = health_pb2_grpc.HealthStub(subject.channel)
    try:
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=subject.patience.answer_s)
    except grpc.aio.AioRpcError as error:
        if may_be_stopped and error.code() in STOPPED:
            return 0
        raise RuleFailed(f"The health check of {service or 'the server'} failed ({error.code().name}).") from error
    return int(answer.status)


def _status_name(status: int) -> str:
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(status))
