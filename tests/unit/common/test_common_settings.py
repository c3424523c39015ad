"""Settings: flags, environment, secret files; a mistake is one sentence and exit code 2."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import Field

from services.common.settings.service import AddressList, CommaList, GrpcServiceSettings, settings_config


class ToySettings(GrpcServiceSettings):
    """Toys.

    Every flag is also an environment variable: --log-level is SLUICE_TOY_LOG_LEVEL.
    """

    model_config = settings_config("toy")

    peers: CommaList = Field([], description="host:port of others")
    callers: AddressList = Field([], description="host:port of more others")
    speed: float = Field(1.0, gt=0, description="how fast")
    count: int = Field(3, ge=1, description="how many")
    secret_url: str = Field("", description="where")


def test_defaults() -> None:
    settings = ToySettings.load([])
    assert (settings.listen, settings.log_level, settings.peers) == ("127.0.0.1:50051", "info", [])


def test_environment_and_flags_and_who_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLUICE_TOY_COUNT", "5")
    monkeypatch.setenv("SLUICE_TOY_LOG_LEVEL", "debug")
    assert (ToySettings.load([]).count, ToySettings.load([]).log_level) == (5, "debug")
    settings = ToySettings.load(["--count", "7"])
    assert (settings.count, settings.log_level) == (7, "debug")


@pytest.mark.parametrize(
    "argv",
    [["--peers", "a:1,b:2"], ["--peers", "a:1", "--peers", "b:2"], ["--peers=a:1, b:2"]],
)
def test_lists_are_repeated_flags_or_commas(argv: list[str]) -> None:
    assert ToySettings.load(argv).peers == ["a:1", "b:2"]


def test_lists_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLUICE_TOY_PEERS", "a:1, b:2,")
    assert ToySettings.load([]).peers == ["a:1", "b:2"]


def test_switches() -> None:
    assert ToySettings.load([]).reflection is None
    assert ToySettings.load(["--reflection"]).reflection is True
    assert ToySettings.load(["--no-reflection"]).reflection is False
    assert ToySettings.load(["--tls-require-client-cert"]).tls_require_client_cert is True


def test_secret_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sluice_toy_secret_url").write_text("redis://secret\n")
    monkeypatch.setitem(ToySettings.model_config, "secrets_dir", tmp_path)
    assert ToySettings.load([]).secret_url == "redis://secret"
    monkeypatch.setenv("SLUICE_TOY_SECRET_URL", "redis://environment")
    assert ToySettings.load([]).secret_url == "redis://environment"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--count", "0"], "--count"),
        (["--count", "many"], "--count"),
        (["--speed", "-1"], "--speed"),
        (["--log-level", "loud"], "--log-level"),
        (["--trace-sample", "5000"], "--trace-sample"),
        (["--nope"], "--nope"),
        (["stray"], "stray"),
        (["--count"], "--count"),
    ],
)
def test_mistake_is_one_sentence(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        ToySettings.load(argv)
    printed = capsys.readouterr()
    assert ended.value.code == 2
    assert printed.out == ""
    assert len(printed.err.splitlines()) == 1
    assert printed.err.startswith("python -m services.toy: ")
    assert message in printed.err


def test_mistake_in_the_environment_does_not_repeat_the_value(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLUICE_TOY_COUNT", "hunter2")
    with pytest.raises(SystemExit) as ended:
        ToySettings.load([])
    printed = capsys.readouterr().err
    assert ended.value.code == 2
    assert "--count" in printed
    assert "hunter2" not in printed


def test_help_lists_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        ToySettings.load(["--help"])
    text = capsys.readouterr().out
    assert ended.value.code == 0
    for name in ToySettings.model_fields:
        assert f"--{name.replace('_', '-')}" in text or f"--no-{name.replace('_', '-')}" in text
    assert "SLUICE_TOY_LOG_LEVEL" in text


def test_settings_do_not_change() -> None:
    settings = ToySettings.load([])
    with pytest.raises(ValueError, match="frozen"):
        settings.count = 9


def test_a_misspelt_variable_is_named_with_what_is_meant() -> None:
    assert ToySettings.misspelt(["SLUICE_TOY_PEER", "sluice_toy_cuont", "SLUICE_TOY_COLOUR"]) == [
        "SLUICE_TOY_COLOUR is not a setting and has no effect.",
        "SLUICE_TOY_CUONT is not a setting and has no effect; did you mean SLUICE_TOY_COUNT?",
        "SLUICE_TOY_PEER is not a setting and has no effect; did you mean SLUICE_TOY_PEERS?",
    ]


@pytest.mark.parametrize(
    "variable",
    [
        *("SLUICE_TOY_COUNT", "sluice_toy_log_level", "SLUICE_OTHER_CUONT", "SLUICE_TOY", "SLUICE_TOYS", "PATH"),
        *("SLUICE_TOY_SERVICE_HOST", "SLUICE_TOY_SERVICE_PORT", "SLUICE_TOY_SERVICE_PORT_GRPC", "SLUICE_TOY_PORT"),
        *("SLUICE_TOY_PORT_50051_TCP", "SLUICE_TOY_PORT_50051_TCP_ADDR", "SLUICE_TOY_NEW_SERVICE_HOST"),
    ],
)
def test_settings_and_variables_of_others_are_not_misspelt(variable: str) -> None:
    assert ToySettings.misspelt([variable]) == []


@pytest.mark.parametrize("address", ["router", "router:", ":1", "router:http", "router:65536", "router:-1"])
def test_what_is_no_address_is_refused_at_once(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        ToySettings.load(["--callers", f"h:1,{address}"])
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"python -m services.toy: --callers: {address!r} is not host:port\n"


def test_addresses_are_names_and_numbers_with_a_port() -> None:
    addresses = ["router:50051", "127.0.0.1:1", "[::1]:65535"]
    assert ToySettings.load(["--callers", ",".join(addresses)]).callers == addresses
