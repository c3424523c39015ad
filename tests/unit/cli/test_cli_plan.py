"""From flags to command lines."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.packages import model_files as models
from services.common.settings.service import spelled_out
from services.gateway.settings import GatewaySettings
from sluice.cli import commands, commands_up
from sluice.cli.errors import BadFlag
from sluice.cli.up import supervisor as supervisor
from sluice.cli.up.options import Options
from sluice.cli.up.pipeline import PipelineFlags
from sluice.cli.up.plan import Process, check, plan
from sluice.cli.up.processing import ProcessingFlags
from sluice.cli.up.supervisor import KEYS_FILE, KEYS_FLAG, invitation


def no_free_port() -> int:
    raise AssertionError("no free port was asked for")


def value(process: Process, flag: str) -> str:
    return process.arguments[process.arguments.index(flag) + 1]


def by_name(options: Options) -> dict[str, Process]:
    return {process.name: process for process in plan(options, no_free_port)}


def test_default_suite() -> None:
    suite = by_name(Options())
    assert {name: process.address for name, process in suite.items()} == {
        "preprocess": "127.0.0.1:50051",
        "router": "127.0.0.1:50052",
        "postprocess": "127.0.0.1:50053",
        "worker-0": "127.0.0.1:50061",
        "worker-1": "127.0.0.1:50062",
        "gateway": "127.0.0.1:8000",
    }
    assert suite["gateway"].health == "http"
    assert {process.health for name, process in suite.items() if name != "gateway"} == {"grpc"}
    for process in suite.values():
        assert process.module == f"services.{process.kind}"
        assert value(process, "--listen") == process.address
        assert float(value(process, "--drain-s")) < 4
        assert value(process, "--log-level") == "warning"


def test_the_printed_command_has_a_key_where_clients_need_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEYS_FILE, raising=False)
    gateway = by_name(Options())["gateway"]
    header = '-H "Authorization: Bearer $SLUICE_API_KEY" '
    printed = invitation(gateway, "m")
    assert header not in printed
    for guarded in (replace(gateway, env={KEYS_FILE: "keys.json"}), replace(gateway, arguments=(KEYS_FLAG, "k"))):
        assert invitation(guarded, "m") == printed.replace("-d ", f"{header}-d ")
    monkeypatch.setenv(KEYS_FILE, "keys.json")
    assert header in invitation(gateway, "m")


def test_gateway_comes_last_so_that_it_finds_the_others() -> None:
    assert [process.kind for process in plan(Options(), no_free_port)][-1] == "gateway"


def test_services_receive_the_addresses_of_the_others() -> None:
    suite = by_name(Options(base_grpc_port=40000, routers=3, redis="redis://h:1/0", preprocess=2, postprocess=2))
    routers = "127.0.0.1:40001,127.0.0.1:40004,127.0.0.1:40005"
    assert value(suite["gateway"], "--router") == routers
    assert value(suite["gateway"], "--preprocess") == "127.0.0.1:40000,127.0.0.1:41000"
    assert value(suite["gateway"], "--postprocess") == "127.0.0.1:40002,127.0.0.1:42000"
    assert value(suite["router-2"], "--preprocess") == "127.0.0.1:40000,127.0.0.1:41000"
    assert value(suite["worker-1"], "--routers") == routers
    assert value(suite["worker-1"], "--worker-id") == "worker-1"
    assert suite["router-2"].address == "127.0.0.1:40005"


def test_redis_url_is_in_the_environment_of_routers_and_in_no_command_line() -> None:
    secret = "redis://user:hunter2@host:6379/0"
    for process in plan(Options(redis=secret), no_free_port):
        assert not any("hunter2" in argument for argument in process.arguments)
        assert dict(process.env) == ({"SLUICE_ROUTER_REDIS_URL": secret} if process.kind == "router" else {})
        assert "hunter2" not in repr(process)
    assert "hunter2" not in repr(Options(redis=secret))


def test_several_gateways_share_a_port_and_with_redis_what_they_know(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLUICE_GATEWAY_LIMITS_REDIS_URL", raising=False)
    monkeypatch.setenv("SLUICE_GATEWAY_RESPONSES_REDIS_URL", "redis://elsewhere:1/0")
    suite = by_name(Options(gateways=3, redis="redis://h:1/0"))
    gateways = [process for process in suite.values() if process.kind == "gateway"]
    assert [process.name for process in gateways] == ["gateway-0", "gateway-1", "gateway-2"]
    assert {process.address for process in gateways} == {"127.0.0.1:8000"}
    assert all("--reuse-port" in process.arguments and process.shares_port for process in gateways)
    assert all(dict(process.env) == {"SLUICE_GATEWAY_LIMITS_REDIS_URL": "redis://h:1/0"} for process in gateways)
    assert all("redis://h:1/0" not in " ".join(process.arguments) for process in gateways)
    alone = by_name(Options(redis="redis://h:1/0"))["gateway"]
    assert not alone.shares_port
    assert not alone.env
    assert "--reuse-port" not in alone.arguments
    assert not by_name(Options(gateways=2))["gateway-1"].env


def test_model_reaches_tokenizers_and_workers(tmp_path: Path) -> None:
    (tmp_path / "tekken.json").write_text("{}")
    suite = by_name(Options(model=str(tmp_path), model_name="mine", processor="mistral"))
    spec = f"mine={tmp_path}@mistral"
    assert value(suite["preprocess"], "--models") == spec
    assert value(suite["postprocess"], "--models") == spec
    assert value(suite["worker-0"], "--model") == spec
    assert not any(str(tmp_path) in argument for argument in suite["gateway"].arguments)


def test_model_folder_may_be_in_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "tokenizer.json").write_text("{}")
    assert check(Options(model="~/m")).source == str(tmp_path / "m")
    assert check(Options(model="~/m")).name == "m"


def test_hub_id_is_not_looked_up() -> None:
    assert str(check(Options(model="org/name"))) == "org/name=org/name"


def test_optional_flags_are_passed_on_when_given() -> None:
    suite = by_name(Options(speedup=20, log_level="debug", engine="mock"))
    assert value(suite["worker-0"], "--speedup") == "20"
    assert value(suite["worker-0"], "--engine") == "mock"
    assert {value(process, "--log-level") for process in suite.values()} == {"debug"}
    assert "--speedup" not in by_name(Options())["worker-0"].arguments


def test_log_level_of_the_environment_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLUICE_ROUTER_LOG_LEVEL", "debug")
    suite = by_name(Options())
    assert "--log-level" not in suite["router"].arguments
    assert value(suite["worker-0"], "--log-level") == "warning"


@pytest.mark.parametrize("routers", [1, 3])
def test_tokenizing_services_get_the_operators_model_and_learn_others_from_the_routers(routers: int) -> None:
    suite = by_name(Options(routers=routers, redis="redis://h:1/0", model_name="mine"))
    for service in ("preprocess", "postprocess"):
        assert value(suite[service], "--models") == f"mine={models.DEFAULT_SOURCE}"
        assert value(suite[service], "--routers") == value(suite["gateway"], "--router")


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        (("--direct-route", "--no-migration-enabled"), {"--routing", "--no-migration"}),
        (("--migration-enabled",), {"--migration"}),
        ((), set()),
    ],
)
def test_other_gateways_names_of_knobs_reach_the_gateway(
    flags: tuple[str, ...], wanted: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Process] = []

    def run(processes: Sequence[Process], *more: object) -> int:
        started.extend(processes)
        return 0

    monkeypatch.setattr(supervisor, "run", run)
    assert commands.invoke(["up", "--port", "0", "--base-grpc-port", "0", *flags]) == 0
    given = {flag for flag in started[-1].arguments if flag.endswith(("-route", "routing", "migration", "enabled"))}
    assert given == wanted


def processing_of(processing: ProcessingFlags, **changes: object) -> dict[str, list[str]]:
    """The processing flags that each service is given."""
    suite = by_name(replace(Options(processing=processing), **changes))  # type: ignore[arg-type]
    return {name: [flag for flag in one.arguments if flag.endswith("-processing")] for name, one in suite.items()}


@pytest.mark.parametrize("name", ["vllm_processing", "sglang_processing", "native_framework_processing"])
def test_processing_flag_reaches_the_services_before_and_after_the_engine(name: str) -> None:
    flag = [f"--{name.replace('_', '-')}"]
    given = processing_of(ProcessingFlags(**{name: True}))  # type: ignore[arg-type]
    assert given.pop("preprocess") == flag
    assert given.pop("postprocess") == flag
    assert not any(given.values())


def test_native_parsers_switched_off_leaves_answers_to_the_built_in_parsers() -> None:
    given = processing_of(ProcessingFlags(vllm_processing=True, native_parsers=False))
    assert given.pop("preprocess") == ["--vllm-processing"]
    assert not any(given.values())


@pytest.mark.parametrize(
    ("engine", "processor"), [("vllm", "vllm"), ("vllm-grpc", "vllm"), ("sglang", "sglang"), ("mock", "mistral")]
)
def test_native_processing_loads_the_operators_model_without_waiting_for_a_worker(engine: str, processor: str) -> None:
    suite = by_name(Options(engine=engine, processing=ProcessingFlags(native_framework_processing=True)))
    for service in ("preprocess", "postprocess"):
        assert value(suite[service], "--models").endswith(f"@{processor}")
    assert "@" not in value(suite["worker-0"], "--model")


def test_native_processing_leaves_a_hub_model_to_its_workers_engine() -> None:
    suite = by_name(Options(model="org/name", processing=ProcessingFlags(native_framework_processing=True)))
    assert value(suite["preprocess"], "--models") == "org/name=org/name"


@pytest.mark.parametrize(
    ("engine", "noted"), [("vllm", False), ("sglang", False), ("mock", True), ("transformers", True)]
)
def test_native_processing_without_native_code_is_noted(engine: str, noted: bool) -> None:
    note = ProcessingFlags(native_framework_processing=True).note(engine)
    assert (f"the engine {engine} has no code" in note) is noted
    assert ProcessingFlags(vllm_processing=True).note(engine) == ""


def test_interpreters_of_the_engines_reach_both_services() -> None:
    suite = by_name(Options(processing=ProcessingFlags(vllm_processing=True, vllm_python=sys.executable)))
    for service in ("preprocess", "postprocess"):
        assert value(suite[service], "--vllm-python") == sys.executable
        assert "--sglang-python" not in suite[service].arguments


def test_host_is_the_gateways_alone() -> None:
    suite = by_name(Options(host="::1", port=9000))
    assert value(suite["gateway"], "--listen") == "[::1]:9000"
    assert {process.host for name, process in suite.items() if name != "gateway"} == {"127.0.0.1"}


def test_zero_stands_for_free_ports() -> None:
    free = itertools.count(20000)
    processes = plan(Options(port=0, base_grpc_port=0), lambda: next(free))
    assert sorted(process.port for process in processes) == list(range(20000, 20006))
    gateway = processes[-1]
    router = next(process for process in processes if process.kind == "router")
    assert value(gateway, "--router") == router.address


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"workers": -1}, "--workers"),
        ({"gateways": 0}, "--gateways"),
        ({"routers": 8, "redis": "redis://h"}, "--routers"),
        ({"routers": 2}, "--redis"),
        ({"redis": "http://h"}, "--redis"),
        ({"port": 65536}, "--port"),
        ({"port": -1}, "--port"),
        ({"base_grpc_port": 65530}, "65524"),
        ({"base_grpc_port": -1}, "--base-grpc-port"),
        ({"speedup": 0.0}, "--speedup"),
        ({"speedup": float("inf")}, "--speedup"),
        ({"speedup": float("nan")}, "--speedup"),
        ({"processor": "nope"}, "hf, mistral"),
        ({"model": "./not-there"}, "./not-there"),
        ({"model": "mistral-common:not-there"}, "tekken_240911"),
        ({"model": "~unknown-here/x"}, "does not exist"),
        ({"model": ""}, "--model"),
        ({"model": "a@b"}, "--model"),
        ({"model_name": "a=b"}, "--model-name"),
        (
            {"processing": ProcessingFlags(vllm_processing=True, native_framework_processing=True)},
            "--native-framework-processing",
        ),
        ({"processing": ProcessingFlags(trtllm_processing=True)}, "docs/preprocessing.md"),
        ({"processing": ProcessingFlags(native_parsers=False)}, "--no-native-parsers"),
    ],
)
def test_refusals_are_one_sentence_that_names_the_flag(changes: dict[str, object], message: str) -> None:
    with pytest.raises(BadFlag) as refused:
        check(replace(Options(), **changes))  # type: ignore[arg-type]
    sentence = str(refused.value)
    assert message in sentence
    assert "\n" not in sentence
    assert sentence.endswith(".")
    assert not sentence.endswith("..")


def test_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadFlag, match="contains no tokenizer"):
        check(Options(model=str(tmp_path)))


def test_relative_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    monkeypatch.chdir(tmp_path.parent)
    assert check(Options(model=f".{os.sep}{tmp_path.name}")).name == tmp_path.name


@given(
    base=st.integers(1, 50000),
    workers=st.integers(1, 990),
    routers=st.integers(1, 7),
    preprocess=st.integers(1, 40),
    postprocess=st.integers(1, 40),
)
def test_no_port_is_used_twice(base: int, workers: int, routers: int, preprocess: int, postprocess: int) -> None:
    options = Options(
        port=65535,
        base_grpc_port=base,
        workers=workers,
        routers=routers,
        redis="redis://h",
        preprocess=preprocess,
        postprocess=postprocess,
    )
    processes = plan(options, no_free_port)
    assert len({process.port for process in processes}) == len(processes)
    assert len({process.name for process in processes}) == len(processes)
    assert len(processes) == workers + routers + preprocess + postprocess + 1
    assert {process.name: process.port for process in processes}["worker-0"] == base + 10


def test_gateway_port_inside_the_suites_range_is_refused() -> None:
    with pytest.raises(BadFlag, match="50052"):
        check(Options(port=50052))


def test_redis_may_be_wherever_routers_find_it_and_nowhere_else() -> None:
    assert plan(Options(redis="rediss+sentinel://a:1,b:2/mine/0"), no_free_port)
    with pytest.raises(BadFlag, match=r"--redis is not a Redis URL: its scheme is 'http'"):
        plan(Options(redis="http://h"), no_free_port)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (PipelineFlags(stage=("route=no_such_module:Sticky",)), "no_such_module"),
        (PipelineFlags(stage=("route=my_own_stages:Sticki",)), "my_own_stages has no Sticki"),
        (PipelineFlags(stage=("route=my_own_stages:Sticky",)), "async def route"),
        (PipelineFlags(handler="my_own_stages:Sticki"), "handler: my_own_stages has no Sticki"),
        (PipelineFlags(stage=("rout=my_own_stages:Sticky",)), "stage 'rout' is unknown"),
    ],
)
def test_class_that_no_gateway_can_load_is_refused_before_anything_starts(
    flags: PipelineFlags, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_own_stages.py").write_text("class Sticky:\n    pass\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadFlag) as refused:
        check(Options(pipeline=flags))
    assert message in str(refused.value)


def test_class_in_the_working_directory_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_sound_stages.py").write_text("class Sticky:\n    async def route(self, wanted, workers): ...\n")
    monkeypatch.chdir(tmp_path)
    path = list(sys.path)
    check(Options(pipeline=PipelineFlags(stage=("route=my_sound_stages:Sticky",))))
    assert sys.path == path


def test_suite_without_workers_starts_everything_else() -> None:
    suite = by_name(Options(workers=0))
    assert sorted(suite) == ["gateway", "postprocess", "preprocess", "router"]
    assert suite["gateway"].workers == 0
    with pytest.raises(BadFlag, match="--workers must be between 0 and 990"):
        check(Options(workers=-1))


@pytest.mark.parametrize(("engine", "python"), [("vllm", sys.executable), ("sglang", ""), ("mock", "")])
def test_interpreter_of_an_engine_runs_its_workers(engine: str, python: str) -> None:
    suite = by_name(Options(engine=engine, processing=ProcessingFlags(vllm_python=sys.executable)))
    assert {name: process.python for name, process in suite.items() if process.python} == (
        {"worker-0": python, "worker-1": python} if python else {}
    )


def test_interpreter_that_is_no_program_is_refused() -> None:
    with pytest.raises(BadFlag, match="--vllm-python /nowhere/python is not a program"):
        check(Options(processing=ProcessingFlags(vllm_python="/nowhere/python")))


def test_further_listeners_of_replicas_have_ports_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLUICE_ROUTER_HTTP_LISTEN", "127.0.0.1:8050")
    monkeypatch.setenv("SLUICE_ROUTER_PICKER_LISTEN", "[::1]:9002")
    monkeypatch.setenv("SLUICE_WORKER_METRICS_LISTEN", "127.0.0.1:0")
    suite = by_name(Options(routers=3, redis="redis://h:1/0"))
    listeners = [
        (suite[name].env.get("SLUICE_ROUTER_HTTP_LISTEN"), suite[name].env.get("SLUICE_ROUTER_PICKER_LISTEN"))
        for name in ("router-0", "router-1", "router-2")
    ]
    assert listeners == [(None, None), ("127.0.0.1:8051", "[::1]:9003"), ("127.0.0.1:8052", "[::1]:9004")]
    assert not suite["worker-1"].env, "port 0 is a free one for each"


@pytest.mark.parametrize(
    ("words", "spelled"),
    [
        (["--migration-enabled", "false", "--port", "0"], ["--no-migration-enabled", "--port", "0"]),
        (["--migration-enabled", "True"], ["--migration-enabled"]),
        (["--migration=false", "--migration", "--port"], ["--no-migration", "--migration", "--port"]),
        (["--name", "false", "--migration", "maybe"], ["--name", "false", "--migration", "maybe"]),
        (["--migration", "--migration", "false"], ["--migration", "--no-migration"]),
        (["--", "--migration", "false"], ["--", "--migration", "false"]),
        (["--migration=maybe", "--migration"], ["--migration=maybe", "--migration"]),
    ],
)
def test_switches_take_the_words_true_and_false(words: list[str], spelled: list[str]) -> None:
    assert spelled_out(words, ["migration", "migration-enabled"]) == spelled


def test_switches_with_words_configure_the_gateway_and_the_suite(monkeypatch: pytest.MonkeyPatch) -> None:
    assert GatewaySettings.load(["--migration", "false"]).pipeline.migration is False
    assert GatewaySettings.load(["--migration", "true", "--ui", "false"]).ui is False
    plans: list[Options] = []

    def keep(options: Options) -> NoReturn:
        plans.append(options)
        sys.exit(0)

    monkeypatch.setattr(commands_up, "check", keep)
    with pytest.raises(SystemExit):
        commands.invoke(["up", "--migration-enabled", "false"])
    assert plans[0].pipeline.migration is False
