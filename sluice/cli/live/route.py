"""`sluice route`: where a prompt would go, and why."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from services.common.packing import pack_u32
from services.gateway.admission.tenants import salted
from sluice.cli.live.client import NotReached, Running, Verdict, reached
from sluice.cli.live.endpoint import Endpoint
from sluice.v1 import router_pb2


def run(place: Endpoint, text: str, model: str, raw: bool, tenant: str, as_json: bool, console: Console) -> int:
    """Asks and prints; the exit code is 0. Raises NotReached when there is no answer.

    Args:
        tenant: whose part of the prefix cache counts; empty for gateways that do not keep tenants apart.
    """
    verdict = asyncio.run(_ask(place, text, model, raw, salted(tenant, "") if tenant else ""))
    if as_json:
        print(json.dumps(asdict(verdict)))
        return 0
    console.print(_sentence(verdict))
    console.print(_table(verdict))
    return 0


async def _ask(place: Endpoint, text: str, model: str, raw: bool, salt: str) -> Verdict:
    async with reached(place) as running:
        name = model or await _only_model(running)
        try:
            ids = pack_u32(await running.tokens(text, name, raw))
            return await running.route(name, router_pb2.PromptRef(token_ids=ids), salt)
        except NotReached as error:
            if not place.router:
                raise
            # Without a gateway the router may know preprocess itself.
            body = {"model": name, "prompt": text} if raw else {"model": name, "messages": [_message(text)]}
            try:
                return await running.route(name, router_pb2.PromptRef(openai_body=json.dumps(body).encode()), salt)
            except NotReached as other:
                raise NotReached(f"{error} {other}") from other


def _message(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


async def _only_model(running: Running) -> str:
    models = sorted({worker.model for worker in await running.workers()})
    if not models:
        raise NotReached("No worker has registered with the router; start one with `sluice worker`.")
    if len(models) > 1:
        raise NotReached(f"There are several models; choose with --model: {', '.join(models)}.")
    return models[0]


def _sentence(verdict: Verdict) -> str:
    said = f"[bold]{escape(verdict.worker)}[/bold] at {verdict.address}"
    if verdict.prefill_worker:
        said += f", after prefill on [bold]{escape(verdict.prefill_worker)}[/bold]"
    if verdict.prompt_tokens:
        said += (
            f": {verdict.tokens_to_compute} of the prompt's {verdict.prompt_tokens} tokens are left to compute there"
        )
    said += "."
    return f"{said} [yellow]Degraded: {verdict.degraded}.[/yellow]" if verdict.degraded else said


def _table(verdict: Verdict) -> Table:
    table = Table("worker", box=None, pad_edge=False, header_style="dim")
    for title in ("cost", "device", "host", "disk", "predicted", "prefill booked", "decode booked"):
        table.add_column(title, justify="right")
    for score in verdict.scores:
        chosen = score.worker in (verdict.worker, verdict.prefill_worker)
        rank = f"/{score.rank}" if score.rank else ""
        table.add_row(
            f"{'▸' if chosen else ' '} {escape(score.worker)}{rank}",
            f"{score.cost:.1f}",
            *(str(blocks) for blocks in score.overlap),
            f"{score.prefill_blocks:.0f}",
            f"{score.decode_blocks:.0f}",
            style="bold" if chosen else "",
        )
    table.caption = "All in blocks; the lowest cost wins, equal costs at random."
    return table
