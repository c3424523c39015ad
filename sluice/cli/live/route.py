"""`sluice route`: shows where a prompt would be routed, and why."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from services.common.base.packing import pack_u32
from services.gateway.admission.tenants import salted
from sluice.cli.live.client import NotReached, RouteVerdict, Running, reached
from sluice.cli.live.endpoint import Endpoint
from sluice.v1 import router_pb2


def run(endpoint: Endpoint, text: str, model: str, raw: bool, tenant: str, as_json: bool, console: Console) -> int:
    """Queries and prints; returns exit code 0, or raises NotReached.

    Args:
        tenant: tenant whose part of the prefix cache counts; empty if the gateway does not separate tenants.
    """
    verdict = asyncio.run(_query(endpoint, text, model, raw, salted(tenant, "") if tenant else ""))
    if as_json:
        print(json.dumps(asdict(verdict)))
        return 0
    console.print(_sentence(verdict))
    console.print(_table(verdict))
    return 0


async def _query(endpoint: Endpoint, text: str, model: str, raw: bool, salt: str) -> RouteVerdict:
    async with reached(endpoint) as running:
        name = model or await _only_model(running)
        try:
            ids = pack_u32(await running.tokens(text, name, raw))
            return await running.route(name, router_pb2.PromptRef(token_ids=ids), salt)
        except NotReached as error:
            if not endpoint.router:
                raise
            # Without a gateway, the router may be connected to preprocess itself.
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
        raise NotReached(f"There are several models; select one with --model: {', '.join(models)}.")
    return models[0]


def _sentence(verdict: RouteVerdict) -> str:
    sentence = f"[bold]{escape(verdict.worker)}[/bold] at {verdict.address}"
    if verdict.prefill_worker:
        sentence += f", after prefill on [bold]{escape(verdict.prefill_worker)}[/bold]"
    if verdict.prompt_tokens:
        sentence += (
            f": {verdict.tokens_to_compute} of the prompt's {verdict.prompt_tokens} tokens are left to compute there"
        )
    sentence += "."
    return f"{sentence} [yellow]Degraded: {verdict.degraded}.[/yellow]" if verdict.degraded else sentence


def _table(verdict: RouteVerdict) -> Table:
    table = Table("worker", box=None, pad_edge=False, header_style="dim")
    for title in ("cost", "device", "host", "disk", "predicted", "prefill reserved", "decode reserved"):
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
    table.caption = "In blocks; the lowest cost wins, a random one among equals."
    return table
