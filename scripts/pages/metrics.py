"""docs/metrics.md, the catalogue of metrics."""

from __future__ import annotations

from importlib import import_module

from scripts.pages.markdown import NOTICE, code, table
from services.common.observability.declarations import Declared, MetricDeclarations
from services.common.observability.label_bounds import Label

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

HEAD = f"""# Metrics

{NOTICE}

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
    catalogues = {}
    for service, modules in MODULES.items():
        imported = [import_module(name) for name in modules]  # each adds its instruments to the first one's METRICS
        catalogues[service] = imported[0].METRICS
    return catalogues


def declared() -> list[Declared]:
    """Returns every declared instrument."""
    return [metric for catalogue in catalogues().values() for metric in catalogue.declared]


def page() -> str:
    """Returns the content of docs/metrics.md."""
    parts = [HEAD]
    for service, catalogue in catalogues().items():
        title = "Every process" if service == "process" else service.capitalize()
        parts.append(f"## {title}\n")
        if service in ABOUT:
            parts.append(ABOUT[service] + "\n")
        rows = map(_row, sorted(catalogue.declared, key=lambda metric: metric.exposed))
        parts += [table("metric", "type", "labels", "meaning", rows=rows), ""]
    return "\n".join(parts)


def _row(metric: Declared) -> tuple[str, ...]:
    meaning = metric.meaning + (f"; only when {metric.when}" if metric.when else "")
    unit = {"s": "seconds: ", "By": "bytes: "}.get(metric.unit, "")
    labels = "<br>".join(_label(label) for label in metric.labels) or "–"
    return code(metric.exposed), metric.kind, labels, unit + meaning


def _label(label: Label) -> str:
    values = ", ".join(map(code, label.values)) if label.values else f"at most {label.most}"
    return f"{code(label.name)}: {label.meaning} ({values})"
