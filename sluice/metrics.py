"""The metrics page: `python -m sluice.metrics` prints it, `--write` writes it to docs/metrics.md."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from services.common.observability.declarations import Declared, MetricDeclarations
from services.common.observability.label_bounds import Label

PAGE = Path(__file__).resolve().parents[1] / "docs" / "metrics.md"
MODULES = {
    "gateway": ("services.gateway.metrics", "services.gateway.admission.metrics"),
    "preprocess": ("services.preprocess.metrics",),
    "router": ("services.router.metrics",),
    "worker": ("services.worker.metrics",),
    "postprocess": ("services.postprocess.metrics",),
    "process": ("services.common.observability.process_metrics",),
}
ABOUT = {
    "gateway": "Served on the gateway's `/metrics` (scope `operate`), and on `--metrics-listen` if that is set.",
    "process": "Served on the endpoint of every process; the label `service` names the service.",
}

HEAD = """# Metrics

<!-- made by `python -m sluice.metrics --write`; do not edit -->

Every service serves Prometheus metrics on `--metrics-listen HOST:PORT` (`SLUICE_<SERVICE>_METRICS_LISTEN`), the
gateway also on `/metrics` of its HTTP port, which needs the scope `operate` (`docs/admission.md`). Port 0 selects a
free port, which is logged. If the port is taken, the service logs this, serves requests nevertheless, and tries again
every five seconds. The worker's endpoint also has the engine's own metrics.

- Counters end in `_total` and start at 0 if all their labels are known in advance. Histograms have `_bucket`, `_count`
  and `_sum`.
- Labels are bounded, whatever clients send: a value that is not in the list below, or exceeds the maximum number of
  values, is counted as `other`. Ids of requests, workers and users are never labels.
- Nothing is recorded per token, only per request or per batch. Inter-token times are means of a generation, one value
  each.
- Every process also has Prometheus' standard `process_*` and `python_*` metrics (CPU, memory, open files, garbage
  collection).
- Alert rules and Grafana dashboards over these metrics are in `deploy/observability`; see
  [observability](observability.md).
"""


def catalogues() -> dict[str, MetricDeclarations]:
    """Returns the metric declarations of every service, and of all processes, by service."""
    found = {}
    for service, modules in MODULES.items():
        imported = [import_module(name) for name in modules]  # each adds its instruments to the first one's METRICS
        found[service] = imported[0].METRICS
    return found


def declared() -> list[Declared]:
    """Returns every declared instrument."""
    return [one for catalogue in catalogues().values() for one in catalogue.declared]


def page() -> str:
    """Returns the content of docs/metrics.md."""
    parts = [HEAD]
    for service, catalogue in catalogues().items():
        title = "Every process" if service == "process" else service.capitalize()
        parts.append(f"## {title}\n")
        if service in ABOUT:
            parts.append(ABOUT[service] + "\n")
        parts.append("| metric | type | labels | meaning |\n| --- | --- | --- | --- |")
        parts.extend(_row(one) for one in sorted(catalogue.declared, key=lambda one: one.exposed))
        parts.append("")
    return "\n".join(parts)


def _row(one: Declared) -> str:
    meaning = one.meaning + (f"; only when {one.when}" if one.when else "")
    unit = {"s": "seconds: ", "By": "bytes: "}.get(one.unit, "")
    labels = "<br>".join(_label(label) for label in one.labels) or "–"
    return f"| `{one.exposed}` | {one.kind} | {labels} | {unit}{meaning} |"


def _label(label: Label) -> str:
    values = ", ".join(f"`{value}`" for value in label.values) if label.values else f"at most {label.most}"
    return f"`{label.name}`: {label.meaning} ({values})"


def main(arguments: Sequence[str]) -> int:
    """Prints or writes the page; returns the exit code."""
    if list(arguments) == ["--write"]:
        PAGE.write_text(page(), encoding="utf-8")
    elif not arguments:
        print(page(), end="")
    else:
        print("usage: python -m sluice.metrics [--write]", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
