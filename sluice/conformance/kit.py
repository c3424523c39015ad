"""Runs rules against one worker, one after another, and reports their results."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence

import grpc

from services.common.base.errors import SluiceError, invalid, unavailable
from services.common.rpc.channels import FOREIGN_KEEPALIVE_MS, open_channel
from services.common.rpc.errors import from_rpc_error
from sluice.conformance import rules
from sluice.conformance.exceptions import NotChecked, NotClaimed, RuleFailed
from sluice.conformance.patience import Patience
from sluice.conformance.rule import Report, Result, Rule, Verdict
from sluice.conformance.subject import Subject, Target
from sluice.v1 import worker_pb2, worker_pb2_grpc

log = logging.getLogger(__name__)

EventListener = Callable[[Result], None]


def select(names: Iterable[str] = ()) -> Sequence[Rule]:
    """Returns the rules with these names, in the order of a run; all rules for no names.

    Raises:
        SluiceError: INVALID_ARGUMENT for an unknown name.
    """
    available, wanted = rules.all_rules(), set(names)
    if unknown := sorted(wanted - {rule.name for rule in available}):
        raise invalid(
            f"There is no rule {', '.join(unknown)}; `sluice conformance --list` lists all rules.", param="rule"
        )
    return [rule for rule in available if not wanted or rule.name in wanted]


async def run(
    target: Target,
    chosen: Sequence[Rule] | None = None,
    patience: Patience | None = None,
    on_result: EventListener = lambda result: None,
) -> Report:
    """Runs every rule, regardless of the results of earlier ones.

    Args:
        target: the worker to test.
        chosen: rules in order; None: all.
        patience: deadlines.
        on_result: called after each rule.

    Raises:
        SluiceError: the worker cannot be reached or is not serving.
    """
    patience = patience or Patience()
    channel = open_channel(target.address, target.credentials, keepalive_ms=FOREIGN_KEEPALIVE_MS)
    try:
        subject = Subject(target, channel, patience, await _get_info(channel, patience))
        report = Report(target.address, f"{subject.info.engine} {subject.info.engine_version}".strip())
        for rule in select() if chosen is None else chosen:
            result = await _run_rule(rule, subject)
            report.results.append(result)
            on_result(result)
        return report
    finally:
        await channel.close()


async def _get_info(channel: grpc.aio.Channel, patience: Patience) -> worker_pb2.GetInfoResponse:
    stub = worker_pb2_grpc.WorkerStub(channel)
    try:
        info = await stub.GetInfo(worker_pb2.GetInfoRequest(), timeout=patience.answer_s)
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error, "worker") from error
    if info.phase and not info.card.model:
        raise unavailable(f"The worker is not serving yet ({info.phase}); try again when it is.")
    return info


async def _run_rule(rule: Rule, subject: Subject) -> Result:
    loop = asyncio.get_running_loop()
    started = loop.time()
    verdict, seen = await _verdict(rule, subject)
    return Result(rule, verdict, seen, loop.time() - started)


async def _verdict(rule: Rule, subject: Subject) -> tuple[Verdict, str]:
    if rule.generates and not subject.serves_complete_requests:
        return Verdict.NOT_CHECKED, "This worker has a prefill or decode role; only the rules prefill and decode apply."
    try:
        async with asyncio.timeout(subject.patience.rule_s):
            return Verdict.PASSED, await rule.check(subject)
    except NotClaimed as reason:
        return Verdict.NOT_CLAIMED, str(reason)
    except NotChecked as reason:
        return Verdict.NOT_CHECKED, str(reason)
    except RuleFailed as reason:
        return Verdict.FAILED, str(reason)
    except TimeoutError:
        return Verdict.FAILED, f"The rule did not complete within {subject.patience.rule_s:g} s."
    except grpc.aio.AioRpcError as error:
        return Verdict.FAILED, f"A call failed with {error.code().name}: {error.details()}"
    except SluiceError as error:
        return Verdict.FAILED, error.message
    except Exception as error:
        log.exception("rule failed on an unexpected response", extra={"rule": rule.name})
        return Verdict.FAILED, f"The response is invalid ({type(error).__name__}: {error})."
