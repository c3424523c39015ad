"""Runs rules against one worker, one after another, and says what became of each."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence

import grpc

from services.common.errors import SluiceError, invalid, unavailable
from services.common.rpc.channels import open_channel
from services.common.rpc.errors import from_rpc_error
from sluice.conformance import rules
from sluice.conformance.patience import Patience
from sluice.conformance.rule import Broken, NotChecked, NotClaimed, Report, Result, Rule, Verdict
from sluice.conformance.subject import Subject, Target
from sluice.v1 import worker_pb2, worker_pb2_grpc

log = logging.getLogger(__name__)

Listener = Callable[[Result], None]


def select(names: Iterable[str] = ()) -> Sequence[Rule]:
    """The rules of these names, in the order of a run; all of them when none is named.

    Raises:
        SluiceError: INVALID_ARGUMENT for a name that no rule has.
    """
    known, wanted = rules.all_rules(), set(names)
    if strangers := sorted(wanted - {rule.name for rule in known}):
        raise invalid(f"There is no rule {', '.join(strangers)}; `sluice conformance --list` names them.", param="rule")
    return [rule for rule in known if not wanted or rule.name in wanted]


async def run(
    target: Target,
    chosen: Sequence[Rule] | None = None,
    patience: Patience | None = None,
    on_result: Listener = lambda result: None,
) -> Report:
    """Tries every rule, whatever became of those before it.

    Args:
        target: which worker.
        chosen: rules in order; None: all.
        patience: deadlines.
        on_result: called after each rule.

    Raises:
        SluiceError: the worker cannot be asked at all.
    """
    patience = patience or Patience()
    channel = open_channel(target.address, target.credentials)
    try:
        subject = Subject(target, channel, patience, await _introduction(channel, patience))
        report = Report(target.address, f"{subject.info.engine} {subject.info.engine_version}".strip())
        for rule in select() if chosen is None else chosen:
            result = await _try(rule, subject)
            report.results.append(result)
            on_result(result)
        return report
    finally:
        await channel.close()


async def _introduction(channel: grpc.aio.Channel, patience: Patience) -> worker_pb2.GetInfoResponse:
    stub = worker_pb2_grpc.WorkerStub(channel)
    try:
        info = await stub.GetInfo(worker_pb2.GetInfoRequest(), timeout=patience.answer_s)
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error, "worker") from error
    if info.phase and not info.card.model:
        raise unavailable(f"The worker does not serve yet, it is {info.phase}; try again when it does.")
    return info


async def _try(rule: Rule, subject: Subject) -> Result:
    loop = asyncio.get_running_loop()
    started = loop.time()
    verdict, seen = await _verdict(rule, subject)
    return Result(rule, verdict, seen, loop.time() - started)


async def _verdict(rule: Rule, subject: Subject) -> tuple[Verdict, str]:
    if rule.generates and not subject.takes_whole_requests:
        return Verdict.NOT_CHECKED, "This worker plays one part of a request only; the rules prefill and decode try it."
    try:
        async with asyncio.timeout(subject.patience.rule_s):
            return Verdict.PASSED, await rule.check(subject)
    except NotClaimed as reason:
        return Verdict.NOT_CLAIMED, str(reason)
    except NotChecked as reason:
        return Verdict.NOT_CHECKED, str(reason)
    except Broken as reason:
        return Verdict.FAILED, str(reason)
    except TimeoutError:
        return Verdict.FAILED, f"The rule did not come to an end within {subject.patience.rule_s:g} s."
    except grpc.aio.AioRpcError as error:
        return Verdict.FAILED, f"A call failed with {error.code().name}: {error.details()}"
    except SluiceError as error:
        return Verdict.FAILED, error.message
    except Exception as error:
        log.exception("a rule stumbled over an answer", extra={"rule": rule.name})
        return Verdict.FAILED, f"The answer cannot be understood ({type(error).__name__}: {error})."
