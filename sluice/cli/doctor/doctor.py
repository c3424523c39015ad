"""`sluice doctor`: checks a running suite from outside and suggests fixes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sluice.cli.doctor.checks import Finding, FindingState, examine
from sluice.cli.live.client import reached
from sluice.cli.live.endpoint import Endpoint

HEALTHY, FAILED = 0, 1
STYLES = {
    FindingState.OK: "green",
    FindingState.WARN: "yellow",
    FindingState.FAIL: "bold red",
    FindingState.SKIPPED: "dim",
}


def run(endpoint: Endpoint, redis_url: str, as_json: bool, console: Console) -> int:
    """Runs the checks and prints the findings; returns exit code 0 if no check failed, else 1."""
    findings = asyncio.run(_examine(endpoint, redis_url))
    failed = any(finding.state is FindingState.FAIL for finding in findings)
    if as_json:
        print(json.dumps({"ok": not failed, "checks": [asdict(finding) for finding in findings]}))
    else:
        console.print(_table(findings))
        console.print(_summary(findings), style=STYLES[FindingState.FAIL if failed else FindingState.OK])
    return FAILED if failed else HEALTHY


async def _examine(endpoint: Endpoint, redis_url: str) -> Sequence[Finding]:
    async with reached(endpoint) as running:
        return await examine(running, redis_url)


def _table(findings: Sequence[Finding]) -> Table:
    table = Table("", "check", "found", "what to do", box=None, pad_edge=False, header_style="dim")
    for finding in findings:
        state = f"[{STYLES[finding.state]}]{finding.state.value}[/]"
        table.add_row(state, escape(finding.check), escape(finding.found), escape(finding.advice))
    return table


def _summary(findings: Sequence[Finding]) -> str:
    counts = {state: sum(finding.state is state for finding in findings) for state in FindingState}
    return (
        f"{counts[FindingState.OK]} ok, {counts[FindingState.WARN]} warnings, {counts[FindingState.FAIL]} failed, "
        f"{counts[FindingState.SKIPPED]} skipped"
    )
