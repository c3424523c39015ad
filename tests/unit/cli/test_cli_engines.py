"""The file of `sluice up --engines`: what it accepts, and how it names a mistake."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from services.worker.engines.http.options import HttpOptions, read_http_options
from services.worker.engines.vllm_grpc.options import read_server_options
from services.worker.settings import WorkerSettings
from sluice.cli.errors import BadFlag
from sluice.cli.up.engines.entries import MAX_ENGINES, BadRegistry, EngineEntry
from sluice.cli.up.engines.file import EngineFile
from sluice.cli.up.engines.nodes import MAX_FILE_BYTES
from sluice.cli.up.engines.workers import EngineListReader
from sluice.cli.up.options import Options
from sluice.cli.up.plan import check, engine_process, plan

ONE = "- name: a\n  url: http://10.0.0.1:8000\n"
GRPC = "- name: a\n  url: grpc://10.0.0.1:50051\n"


def written(folder: Path, text: str) -> Path:
    file = folder / "engines.yaml"
    file.write_text(text)
    return file


def mistake(folder: Path, text: str) -> str:
    with pytest.raises(BadRegistry) as caught:
        EngineFile(written(folder, text)).entries()
    return str(caught.value).removeprefix(f"{folder}/")


def test_engine_file_with_all_fields_gives_the_flags_of_a_worker(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("secret")
    text = (
        "- {name: gpu-1, url: 'https://[fd00::1]:8000/'}\n"
        "- name: second\n"
        "  url: http://host:8001\n"
        "  kv_events: tcp://host:5557\n"
        "  kv_replay: tcp://host:5558\n"
        "  api_key_file: key\n"
        "  model: chat=/models/chat\n"
        "  block_size: 32\n"
    )
    first, second = EngineFile(written(tmp_path, text)).entries()
    assert first == EngineEntry("gpu-1", "https://[fd00::1]:8000/")
    assert (first.line, second.line) == (1, 2)
    settings = WorkerSettings.load(list(second.worker_arguments()))
    assert (settings.worker_id, settings.engine, settings.model) == ("second", "http", "chat=/models/chat")
    assert settings.block_size == 32
    key = str(tmp_path / "key")
    assert read_http_options(settings) == HttpOptions("http://host:8001", "tcp://host:5557", "tcp://host:5558", key)


@pytest.mark.parametrize("url", ["grpc://host:50051", "grpc://[fd00::1]:50051/"])
def test_engine_file_with_a_grpc_server_gives_the_flags_of_a_vllm_grpc_worker(tmp_path: Path, url: str) -> None:
    (entry,) = EngineFile(written(tmp_path, f"- {{name: a, url: '{url}', block_size: 32}}\n")).entries()
    settings = WorkerSettings.load(list(entry.worker_arguments()))
    assert (settings.worker_id, settings.engine, settings.block_size) == ("a", "vllm-grpc", 32)
    address = url.removeprefix("grpc://").rstrip("/")
    assert read_server_options(settings, "").address == address


@pytest.mark.parametrize("text", ["", "# nothing yet\n", "[]"])
def test_engine_file_without_entries_is_empty(tmp_path: Path, text: str) -> None:
    assert EngineFile(written(tmp_path, text)).entries() == ()


def test_engine_file_in_json_is_read(tmp_path: Path) -> None:
    (entry,) = EngineFile(written(tmp_path, json.dumps([{"name": "a", "url": "http://h:1"}]))).entries()
    assert entry.name == "a"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("name: a\n", "engines.yaml:1: the file must be a list of engines, or a mapping with kubernetes."),
        ("- a\n- b\n", "engines.yaml:1: the entry must be a mapping with name and url."),
        (ONE + "- name: b\n", "engines.yaml:3: url is missing."),
        ("- url: http://h:1\n", "engines.yaml:1: name is missing."),
        (ONE + "  speed: 3\n", "engines.yaml:3: speed is unknown; use name, url, kv_events, kv_replay, "),
        (ONE + "  name: b\n", "engines.yaml:3: name is set twice."),
        (ONE + "- name: a\n  url: http://h:2\n", "engines.yaml:3: name 'a' is already used in line 1."),
        (
            ONE + "- name: b\n  url: http://10.0.0.1:8000/\n",
            "engines.yaml:3: url 'http://10.0.0.1:8000' is already",
        ),
        ("- name: a/b\n  url: http://h:1\n", "engines.yaml:1: name is 'a/b'; use letters, digits"),
        ("- name: 7\n  url: http://h:1\n", "engines.yaml:1: name must be a text; quote it."),
        ("- name: a\n  url: [http://h:1]\n", "engines.yaml:2: url must be a text; quote it."),
        ("- name: a\n  url: h:1\n", "engines.yaml:2: url is 'h:1', expected http://host:port."),
        ("- name: a\n  url: ftp://h:1\n", "engines.yaml:2: url is 'ftp://h:1', expected http://host:port."),
        ("- name: a\n  url: grpc://h\n", "engines.yaml:2: url is 'grpc://h', expected grpc://host:port."),
        ("- name: a\n  url: grpc://h:1/x\n", "engines.yaml:2: url is 'grpc://h:1/x', expected grpc://host:port."),
        (GRPC + "  kv_events: tcp://h:5557\n", "engines.yaml:1: kv_events has no meaning with a grpc:// url."),
        (GRPC + "  api: openai\n", "engines.yaml:1: api has no meaning with a grpc:// url."),
        ("- name: a\n  url: http://h:1/v1\n", "engines.yaml:2: url is 'http://h:1/v1', expected http://host:port."),
        ("- name: a\n  url: http://h:99999\n", "engines.yaml:2: url is 'http://h:99999', expected"),
        ("- name: a\n  url: http://u:p@h:1\n", "engines.yaml:2: url contains credentials; use api_key_file."),
        (
            ONE + "  kv_events: h:5557\n",
            "engines.yaml:3: kv_events is 'h:5557', expected tcp://host:port or ipc://path.",
        ),
        (ONE + "  kv_events: tcp://*:5557\n", "engines.yaml:3: kv_events is 'tcp://*:5557', expected"),
        (ONE + "  kv_replay: tcp://h:5558\n", "engines.yaml:1: kv_replay needs kv_events."),
        (ONE + "  api_key_file: nowhere\n", "engines.yaml:3: api_key_file 'nowhere' is not a file."),
        (ONE + "  model: a=\n", "engines.yaml:3: model is 'a=': model 'a=' has no source"),
        (ONE + "  block_size: big\n", "engines.yaml:3: block_size must be a number."),
        (ONE + "  block_size: 0\n", "engines.yaml:3: block_size is '0'; it must be between 1 and 1024."),
        (ONE + "  block_size: 0x10\n", "engines.yaml:3: block_size is '0x10'; it must be between"),
        (ONE + "  url:\n", "engines.yaml:3: url is set twice."),
        ("- name: a\n  url:\n", "engines.yaml:2: url must be a text; quote it."),
        ("- name: a\n url: {\n", "engines.yaml:2: the file is not valid YAML"),
        ("- !!python/object:os.system {}\n", "engines.yaml:1: name is missing."),
        ("[" * 20_000, "engines.yaml:1: the file is not valid YAML."),
        ("- {}\n" * (MAX_ENGINES + 1), f"engines.yaml:1: the file lists more than {MAX_ENGINES} engines."),
    ],
)
def test_engine_file_with_a_mistake_names_line_and_field(tmp_path: Path, text: str, expected: str) -> None:
    assert mistake(tmp_path, text).startswith(expected)


def test_engine_file_that_is_absent_or_too_large_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(BadRegistry, match="cannot be read: No such file"):
        EngineFile(tmp_path / "none.yaml").entries()
    assert "larger than 1024 KiB" in mistake(tmp_path, "#" * (MAX_FILE_BYTES + 1))


def test_plan_with_engines_has_no_workers_of_its_own(tmp_path: Path) -> None:
    ports = iter(range(20_000, 20_100))
    options = Options(port=0, base_grpc_port=0, engines=written(tmp_path, ONE))
    suite = {process.name: process for process in plan(options, lambda: next(ports))}
    assert set(suite) == {"preprocess", "router", "postprocess", "gateway"}
    arguments = suite["preprocess"].arguments
    assert arguments[arguments.index("--models") + 1] == ""
    assert suite["gateway"].workers == 1
    (entry,) = EngineFile(tmp_path / "engines.yaml").entries()
    process = engine_process(options, entry, "127.0.0.1:20001", 20_099)
    assert (process.name, process.port, process.module) == ("a", 20_099, "services.worker")
    assert process.arguments[2:4] == ("--routers", "127.0.0.1:20001")


@pytest.mark.parametrize("flags", [{"workers": 3}, {"engine": "vllm"}, {"model": "x"}, {"speedup": 2.0}])
def test_plan_with_engines_and_flags_of_own_workers_is_rejected(tmp_path: Path, flags: dict[str, object]) -> None:
    with pytest.raises(BadFlag, match="--engines replaces the suite's own workers; remove --"):
        check(Options(engines=written(tmp_path, ONE), **flags))  # type: ignore[arg-type]


def test_plan_with_an_invalid_engine_file_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(BadFlag, match=r"engines\.yaml:1: name is missing"):
        EngineListReader(written(tmp_path, "- url: http://h:1\n")).check()
