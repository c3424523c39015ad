"""What a Prometheus endpoint says, and where the processes of a suite have theirs."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence

import httpx
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

SERVICES = ("GATEWAY", "PREPROCESS", "ROUTER", "POSTPROCESS", "WORKER")
METRICS_EVERYWHERE = {f"SLUICE_{service}_METRICS_LISTEN": "127.0.0.1:0" for service in SERVICES}

_ENDPOINT = re.compile(r"metrics are served.*address=(\S+)")


def families(url: str) -> dict[str, Metric]:
    """The metric families of an endpoint by name; counters without _total, as the parser has them."""
    answer = httpx.get(url, timeout=20)
    assert answer.status_code == 200, answer.text
    return {family.name: family for family in text_string_to_metric_families(answer.text)}


def endpoints(output: Sequence[str], number: int, within_s: float = 30) -> list[str]:
    """URLs of the endpoints that the log of a suite names, when there are as many as expected."""
    deadline = time.monotonic() + within_s
    while True:
        found = [match[1] for line in list(output) if (match := _ENDPOINT.search(line))]
        if len(found) >= number:
            return [f"http://{address}/metrics" for address in found]
        assert time.monotonic() < deadline, f"{len(found)} endpoints, not {number}"
        time.sleep(0.1)


def value(found: Mapping[str, Metric], name: str, **labels: str) -> float:
    """Sum of the samples with this name that have these labels."""
    return sum(
        sample.value
        for family in found.values()
        for sample in family.samples
        if sample.name == name and all(sample.labels.get(key) == wanted for key, wanted in labels.items())
    )
