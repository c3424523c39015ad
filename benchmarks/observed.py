"""Compares what two checkouts report of the same requests: metrics, spans, receipts, audit log and live view.

A change that makes a request cheaper must not lose what is observed of it. Both suites receive the same mixed requests,
one at a time; durations and ids are left out, and what differs is printed.
"""

from __future__ import annotations

import json
import random
import re
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import grpc
import httpx
import typer
from count_kinds import CALL, MODEL, PARSERS, TOOLS, prompts
from observability import SERVICES, Collector
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2
from processes import own_suite
from prometheus_client.parser import text_string_to_metric_families

from services.common.net.ports import free_port

FLUSHED_AFTER_S = 7.0
"""Spans are exported every 5 s."""
UNSTEADY = re.compile(
    r"lag|log_lines|batch|process_spans|python_|_created|kv_event|path=/ready|stage=(router\.(free|mark)|worker\.get_info)"
)
"""Metrics that depend on the time: periodic samples, probes, and what is collected into messages."""
RECEIPT = "x-sluice-route-receipt"
TIMED = frozenset(("time", "duration_ms", "request_id", "at", "ended", "started"))
"""Fields of an audit entry that differ between two runs."""

Observed = Mapping[str, Counter[str]]

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


class NamedSpans(Collector):
    """Counts spans by service, name, attributes and status."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        for resource in request.resource_spans:
            service = next(
                pair.value.string_value for pair in resource.resource.attributes if pair.key == "service.name"
            )
            for scope in resource.scope_spans:
                for span in scope.spans:
                    attributes = ",".join(sorted(pair.key for pair in span.attributes))
                    self.names[f"{service} {span.name} [{attributes}] status {span.status.code}"] += 1
        return super().Export(request, context)


def requests(number: int) -> Iterator[tuple[str, dict[str, Any], dict[str, str]]]:
    """Yields path, body and headers of mixed requests, the same in every run."""
    texts, chosen = prompts(), random.Random(7)
    for at in range(number):
        text = next(texts)
        messages = [{"role": "user", "content": text}]
        chat = {"model": MODEL, "messages": messages, "max_tokens": chosen.choice((1, 8, 40)), "ignore_eos": True}
        scripted = {**chat, "messages": [{"role": "user", "content": f"{text} <<<script: {CALL}>>>"}], "tools": TOOLS}
        streamed = {"stream": True, "stream_options": {"include_usage": True}}
        bodies: list[tuple[str, dict[str, Any]]] = [
            ("/v1/chat/completions", chat),
            ("/v1/chat/completions", {**chat, **streamed}),
            ("/v1/chat/completions", {**scripted, "max_tokens": 200, **streamed}),
            ("/v1/chat/completions", {**chat, "n": 2, "logprobs": True, "user": "someone"}),
            ("/v1/completions", {"model": MODEL, "prompt": text, "max_tokens": 8, "ignore_eos": True}),
            ("/v1/responses", {"model": MODEL, "input": text, "max_output_tokens": 8, "store": False}),
            ("/v1/messages", {"model": MODEL, "messages": messages, "max_tokens": 8, "stream": True}),
            ("/v1/embeddings", {"model": MODEL, "input": text}),
            ("/v1/chat/completions", {**chat, "model": "unknown"}),
            ("/v1/chat/completions", {**chat, "max_tokens": text}),
            ("/v1/completions", {"model": MODEL, "prompt": text, "max_tokens": 1_000_000}),
        ]
        path, body = chosen.choice(bodies)
        yield path, body, {"x-sluice-receipt": "true"} if at % 3 == 0 else {}


def observe(tree: Path | None, number: int) -> Observed:
    """Runs a suite, sends it the requests, and returns what it reported, by kind."""
    spans = NamedSpans()
    with tempfile.TemporaryDirectory() as folder:
        audit = Path(folder) / "audit.jsonl"
        metrics = {service: f"127.0.0.1:{free_port()}" for service in SERVICES}
        added = {
            "SLUICE_GATEWAY_AUDIT_LOG": str(audit),
            "SLUICE_GATEWAY_TRACE_SAMPLE": "1",
            **PARSERS,
            **{f"SLUICE_{service}_METRICS_LISTEN": address for service, address in metrics.items()},
            **{f"SLUICE_{service}_OTLP_ENDPOINT": spans.endpoint for service in SERVICES},
        }
        if tree is not None:
            added["PYTHONPATH"] = str(tree)
        with own_suite(1, 1000.0, ("--model-name", MODEL), tree, added) as url:
            answers, receipts = _sent(url, number)
            time.sleep(FLUSHED_AFTER_S)
            view = httpx.get(f"{url}/ui/data/state", timeout=30).text
            values = _metrics(metrics.values())
        entries = Counter(_shape(json.loads(line)) for line in audit.read_text().splitlines())
    spans.stop()
    return {
        "statuses": answers,
        "receipts": receipts,
        "metrics": values,
        "spans": spans.names,
        "audit": entries,
        "live view": Counter(_paths(json.loads(view))),
    }


def _sent(url: str, number: int) -> tuple[Counter[str], Counter[str]]:
    statuses: Counter[str] = Counter()
    receipts: Counter[str] = Counter()
    with httpx.Client(base_url=url, timeout=60) as client:
        for path, body, headers in requests(number):
            answer = client.post(path, json=body, headers=headers)
            names = ",".join(sorted({*answer.headers} - {"content-length", "transfer-encoding"}))
            statuses[f"{path} {answer.status_code} [{names}]"] += 1
            if receipt := answer.headers.get(RECEIPT):
                receipts[",".join(sorted(_paths(json.loads(receipt))))] += 1
            elif '"route_receipt' in answer.text or '"receipt' in answer.text:
                receipts["in the body"] += 1
    return statuses, receipts


def _metrics(addresses: Iterable[str]) -> Counter[str]:
    values: Counter[str] = Counter()
    for address in addresses:
        for family in text_string_to_metric_families(httpx.get(f"http://{address}/metrics", timeout=30).text):
            for sample in family.samples if family.type in ("counter", "histogram") else ():
                labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
                name = f"{sample.name}{{{labels}}}"
                if sample.name.endswith(("_total", "_count")) and sample.value and not UNSTEADY.search(name):
                    values[name] += int(sample.value)
    return values


def _shape(entry: Mapping[str, Any]) -> str:
    return json.dumps(
        {key: value for key, value in entry.items() if key not in TIMED and "ms" not in key}, sort_keys=True
    )


def _paths(value: Any, prefix: str = "") -> Iterator[str]:
    """Yields the paths of the fields of a JSON value, list items alike."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _paths(item, f"{prefix}.{key}")
    elif isinstance(value, list):
        yield from {path for item in value for path in _paths(item, f"{prefix}[]")}
    else:
        yield prefix


@app.command()
def observed(
    before: Annotated[Path, typer.Option(help="another checkout of Sluice", exists=True, file_okay=False)],
    number: Annotated[int, typer.Option("--requests", min=1, help="mixed requests to each")] = 1_000,
) -> None:
    """Compare what two checkouts report of the same requests; the exit code is 1 if anything is lost."""
    theirs, ours = observe(before, number), observe(None, number)
    lost = False
    for kind in theirs:
        different = {name for name in theirs[kind].keys() | ours[kind].keys() if theirs[kind][name] != ours[kind][name]}
        print(f"{kind}: {len(theirs[kind])} before, {len(ours[kind])} now, {len(different)} differ")
        for name in sorted(different):
            print(f"  {theirs[kind][name]} -> {ours[kind][name]}: {name}")
            lost = lost or not ours[kind][name]
    raise typer.Exit(1 if lost else 0)


if __name__ == "__main__":
    app()
