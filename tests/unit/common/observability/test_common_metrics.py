"""Declared metrics, their bounds, and health beside them."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest

from scripts.pages import metrics
from services.common.observability import instruments
from services.common.observability import scrape_server as scraping
from services.common.observability.declarations import MODEL, Declared, MetricDeclarations
from services.common.observability.instruments import Counter, Gauge, Histogram, watch
from services.common.observability.label_bounds import OTHER, Label, LabelBounds
from services.common.observability.scrape_server import ScrapeEndpoint


class Scrape:
    """Instruments made here are read as Prometheus would."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(instruments, "_made", instruments._Made())
        self.registry = CollectorRegistry()
        instruments.expose(self.registry)

    def text(self) -> str:
        return generate_latest(self.registry).decode()

    def points(self, name: str) -> dict[tuple[str, ...], float]:
        return instruments.read(name)


@pytest.fixture
def scrape(monkeypatch: pytest.MonkeyPatch) -> Scrape:
    return Scrape(monkeypatch)


def test_names_are_unique_and_as_prometheus_wants_them() -> None:
    declared = metrics.declared()
    names = [one.exposed for one in declared]
    assert len(set(names)) == len(names)
    for one in declared:
        assert one.exposed.startswith(f"sluice_{one.service}_")
        assert one.exposed.replace("_", "").isalnum()
        assert one.exposed == one.exposed.lower()
        assert one.exposed.endswith("_total") == (one.kind == "counter"), one.exposed
        assert one.unit in ("", "s", "By")
        assert one.unit != "s" or one.exposed.removesuffix("_total").endswith("_seconds"), one.exposed
        assert one.meaning.strip()
        assert not one.meaning.endswith(".")
        assert list(one.buckets) == sorted(set(one.buckets))
        assert bool(one.buckets) == (one.kind == "histogram"), one.exposed


def test_every_label_is_bounded() -> None:
    for one in metrics.declared():
        for label in one.labels:
            assert label.meaning
            assert 0 < (len(label.values) or label.most) <= 256, (one.exposed, label.name)
            assert label.name not in {"request_id", "worker_id", "user", "le", "quantile", "instance", "job"}


def test_ten_thousand_models_and_ids_are_a_hundred_and_one_series(scrape: Scrape) -> None:
    for one in metrics.declared():
        make_and_flood(one)
    series = [line for line in scrape.text().splitlines() if line.startswith("sluice_")]
    assert len(series) > len(metrics.declared())
    for one in metrics.declared():
        bound = 1
        for label in one.labels:
            bound *= (len(label.values) or label.most) + 1
        per_series = len(one.buckets) + 3 if one.kind == "histogram" else 1
        mine = [line for line in series if line.split("{")[0].split(" ")[0].startswith(one.exposed)]
        assert 0 < len(mine) <= bound * per_series, one.exposed
        assert len(mine) <= 300 * per_series, f"{one.exposed} takes {len(mine)} series"


def make_and_flood(one: Declared) -> None:
    """Every label is given 10,000 values."""
    floods: list[Mapping[str, str]] = [{label.name: f"{n}" for label in one.labels} for n in range(10_000)]
    if one.kind == "histogram":
        histogram = Histogram(one)
        for labels in floods[:1000]:  # slower, and bounded by the same code
            histogram.record(1, labels)
    elif one.kind == "counter":
        counter = Counter(one)
        for labels in floods:
            counter.add(1, labels)
    else:
        watch(one, lambda: [(1, labels) for labels in floods])


def test_surplus_values_are_counted_together(scrape: Scrape) -> None:
    catalogue = MetricDeclarations("test")
    counter = Counter(catalogue.counter("things", "things", Label("model", "of them", most=2)))
    for model in ("a", "b", "c", "d", "a"):
        counter.add(1, {"model": model})
    assert scrape.points("sluice_test_things") == {("a",): 2, ("b",): 1, (OTHER,): 2}


def test_values_that_are_not_declared_are_other(scrape: Scrape) -> None:
    catalogue = MetricDeclarations("test")
    counter = Counter(catalogue.counter("ends", "ends", Label("how", "it ended", ("well", "badly"))))
    counter.add(3, {"how": "well"})
    counter.add(1, {"how": "strangely"})
    counter.add(1, {"how": "well", "undeclared": "label"})
    assert scrape.points("sluice_test_ends") == {("well",): 4, ("badly",): 0, (OTHER,): 1}


def test_gauges_make_room_for_those_that_come_later(scrape: Scrape) -> None:
    alive = ["a", "b"]
    watch(
        MetricDeclarations("test").gauge("alive", "models", Label("model", "that lives", most=2)),
        lambda: [(1, {"model": model}) for model in alive],
    )
    assert scrape.points("sluice_test_alive") == {("a",): 1, ("b",): 1}
    alive[:] = ["c", "d", "e", "f"]
    assert scrape.points("sluice_test_alive") == {("c",): 1, ("d",): 1, (OTHER,): 2}


def test_ages_are_folded_to_the_oldest(scrape: Scrape) -> None:
    gauge = MetricDeclarations("test").gauge(
        "age_seconds", "age", Label("model", "of it", most=1), unit="s", together="max"
    )
    watch(gauge, lambda: [(1, {"model": "a"}), (5, {"model": "b"}), (3, {"model": "c"})])
    assert scrape.points("sluice_test_age_seconds") == {("a",): 1, (OTHER,): 5}


def test_levels_go_down_again(scrape: Scrape) -> None:
    level = Gauge(MetricDeclarations("test").gauge("streams", "alive"))
    level.add(+2)
    level.add(-1)
    assert scrape.points("sluice_test_streams") == {(): 1}
    assert "# TYPE sluice_test_streams gauge" in scrape.text()


def test_histogram_counts_values_by_bucket(scrape: Scrape) -> None:
    histogram = Histogram(MetricDeclarations("test").histogram("wait_seconds", "wait", MODEL, buckets=(0.1, 1)))
    for value in (0.05, 0.1, 0.5, 7):
        histogram.record(value, {"model": "m"})
    lines = [line for line in scrape.text().splitlines() if line.startswith("sluice_test_wait")]
    assert lines == [
        'sluice_test_wait_seconds_bucket{le="0.1",model="m"} 2.0',
        'sluice_test_wait_seconds_bucket{le="1.0",model="m"} 3.0',
        'sluice_test_wait_seconds_bucket{le="+Inf",model="m"} 4.0',
        'sluice_test_wait_seconds_count{model="m"} 4.0',
        'sluice_test_wait_seconds_sum{model="m"} 7.65',
    ]


def test_one_that_cannot_be_read_does_not_hide_the_others(scrape: Scrape, caplog: pytest.LogCaptureFixture) -> None:
    catalogue = MetricDeclarations("test")
    watch(catalogue.gauge("broken", "b"), lambda: [(1 / 0, {})])
    Counter(catalogue.counter("sound", "s")).add(1)
    for _ in range(3):
        assert "sluice_test_sound_total 1.0" in scrape.text()
    assert caplog.text.count("sluice_test_broken cannot be read") == 1


def test_exposed_names_are_those_of_the_endpoint(scrape: Scrape) -> None:
    for one in metrics.declared():
        make_and_flood(Declared(one.service, one.name, one.kind, one.meaning, (), one.unit, one.buckets))
    text = scrape.text()
    for one in metrics.declared():
        assert f"# TYPE {one.exposed} {one.kind}" in text


def test_counting_from_many_threads_loses_nothing(scrape: Scrape) -> None:
    counter = Counter(MetricDeclarations("test").counter("hits", "hits", MODEL))

    def count() -> None:
        for _ in range(2000):
            counter.add(1, {"model": "m"})

    threads = [threading.Thread(target=count) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert scrape.points("sluice_test_hits") == {("m",): 16_000}


@given(st.lists(st.tuples(st.text(max_size=3), st.text(max_size=3)), max_size=200))
def test_no_history_gets_past_the_bounds(values: list[tuple[str, str]]) -> None:
    bounds = LabelBounds((Label("a", "", most=3), Label("b", "", ("x", "y"))))
    first = {pair: bounds.values({"a": pair[0], "b": pair[1]}) for pair in values}
    again = {pair: bounds.values({"b": pair[1], "a": pair[0]}) for pair in values}
    assert first == again, "what was kept once is kept"
    assert len({kept[0] for kept in first.values()} - {OTHER}) <= 3
    assert {kept[1] for kept in first.values()} <= {"x", "y", OTHER}


@pytest.fixture
def url() -> Iterator[str]:
    endpoint = ScrapeEndpoint("127.0.0.1:0")
    endpoint.start()
    yield f"http://127.0.0.1:{endpoint.port}"
    endpoint.close()


def asked(url: str) -> tuple[int, dict[str, object]]:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=20) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def test_it_follows_the_servers_health(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scraping, "health", scraping.health_of_server)
    monkeypatch.setattr(scraping, "serving", False)
    assert asked(url) == (503, {"status": "waiting"})
    monkeypatch.setattr(scraping, "serving", True)
    assert asked(url) == (200, {"status": "ok"})


def test_health_of_a_service_includes_its_reasons(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said = {"status": "waiting", "phase": "loading weights", "phase_share": 0.25}
    monkeypatch.setattr(scraping, "health", lambda: said)
    assert asked(url) == (503, said)


def test_metrics_are_at_every_other_path(url: str) -> None:
    for path in ("/metrics", "/"):
        with urllib.request.urlopen(f"{url}{path}", timeout=20) as answer:
            assert b"# TYPE" in answer.read()
