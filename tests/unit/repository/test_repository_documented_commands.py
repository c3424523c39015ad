"""Every command, flag, variable and file that the documentation names is there."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import typer

from services.common.settings.service import GrpcServiceSettings, ServiceSettings
from services.gateway.settings import GatewaySettings
from services.postprocess.settings import PostprocessSettings
from services.preprocess.settings import PreprocessSettings
from services.router.settings import RouterSettings
from services.worker.settings import WorkerSettings
from sluice.cli.commands import app
from tests.support.data.documented import Document, documents, flags_of
from tests.support.repository import ROOT

SETTINGS: dict[str, type[ServiceSettings]] = {
    "gateway": GatewaySettings,
    "preprocess": PreprocessSettings,
    "router": RouterSettings,
    "postprocess": PostprocessSettings,
    "worker": WorkerSettings,
}
OTHERS = {
    "docker": "build build-arg entrypoint env-file profile rm scale target wait",
    "kubectl": "cert from-file from-literal key",
    "curl": "cacert",
    "git": "no-local",
    "pytest": "collect-only",
    "vllm": "enable-prompt-embeds enable-prompt-tokens-details enable-scale-out "
    "enable-sleep-mode grpc kv-cache-dtype kv-events-config kv-transfer-config "
    "profiler-config runner scheduling-policy skip-tokenizer-init tensor-parallel-size",
}
PAGES = pytest.mark.parametrize("page", documents(), ids=lambda page: page.name)


def flags_of_service(service: str) -> set[str]:
    flags = {"--help"}
    for name, field in SETTINGS[service].model_fields.items():
        flag = name.replace("_", "-")
        flags |= {f"--{flag}", f"--no-{flag}"} if field.annotation in (bool, bool | None) else {f"--{flag}"}
    return flags


@cache
def sluice_commands() -> dict[str, set[str]]:
    """The flags of each command, such as `keys create`."""
    return dict(_walk(typer.main.get_command(app), ""))


def _walk(command: Any, name: str) -> Iterator[tuple[str, set[str]]]:
    inner = getattr(command, "commands", {})
    flags = {option for one in command.params for option in (*one.opts, *one.secondary_opts)}
    yield name, flags | {"--help"} | (flags_of_service("worker") if name == "worker" else set())
    for word, one in inner.items():
        yield from _walk(one, f"{name} {word}".strip())


@cache
def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@cache
def known_flags() -> set[str]:
    ours = set().union(*sluice_commands().values(), *(flags_of_service(service) for service in SETTINGS))
    folders = ("benchmarks/*.py", "tests/support/*.py", "tests/certificate/*.py", "scripts/*.sh")
    scripts = [script for folder in folders for script in ROOT.glob(folder)]
    ours |= {flag for script in scripts for flag in re.findall(r"--[a-z][a-z0-9-]+", script.read_text())}
    options = re.findall(r"(\w+): Annotated", "".join(file.read_text() for file in ROOT.glob("benchmarks/*.py")))
    ours |= {f"--{option.replace('_', '-')}" for option in options}
    return ours | {f"--{flag}" for flags in OTHERS.values() for flag in flags.split()}


@cache
def known_variables() -> set[str]:
    ours = {
        f"{settings.model_config['env_prefix']}{name}".upper()
        for settings in SETTINGS.values()
        for name in settings.model_fields
    }
    ours |= {f"SLUICE_SERVICE_{name}".upper() for name in GrpcServiceSettings.model_fields}  # SERVICE stands for any
    files = [*ROOT.glob("deploy/compose/**/*.*"), *ROOT.glob("sluice/cli/**/*.py")]
    ours |= {name for file in files for name in re.findall(r"\bSLUICE_[A-Z0-9_]*[A-Z0-9]", file.read_text())}
    tests = [file.read_text() for file in ROOT.glob("tests/**/*.py")]
    read = re.compile(r"""environ(?:\.get\(|\[)"(SLUICE_[A-Z_]*[A-Z])"|\b(SLUICE_TEST_[A-Z_]*[A-Z])""")
    return ours | {plain or of_tests for text in tests for plain, of_tests in read.findall(text)}


def wrong_command(words: list[str]) -> str:
    """What is wrong with a command of ours; empty when nothing is, or when it is another program's."""
    match words:
        case ["sluice", *rest]:
            return _wrong_sluice(rest)
        case ["make", *rest]:
            targets = [word for word in rest if "=" not in word and not word.startswith("-")]
            unknown = [target for target in targets if target not in make_targets()]
            return f"make has no target {unknown[0]}" if unknown else _wrong_arguments(rest)
        case ["python" | ".venv/bin/python", "-m", module, *rest] if module.startswith(("services.", "sluice.")):
            if importlib.util.find_spec(module) is None:
                return f"there is no module {module}"
            service = module.removeprefix("services.")
            return _unknown(flags_of(rest), flags_of_service(service), module) if service in SETTINGS else ""
    return ""


def _wrong_sluice(words: list[str]) -> str:
    commands = sluice_commands()
    if not words or words[0].startswith("-"):
        return _unknown(flags_of(words), commands[""], "sluice")
    for length in (2, 1):
        if (name := " ".join(words[:length])) in commands:
            return _unknown(flags_of(words), commands[name], f"sluice {name}")
    return f"sluice has no command {words[0]}"


def _wrong_arguments(words: list[str]) -> str:
    """ARGS of `make run` go to `sluice up`."""
    given = [word.removeprefix("ARGS=") for word in words if word.startswith("ARGS=")]
    if "run" not in words or not given:
        return ""
    return _unknown(flags_of(given[0].split()), sluice_commands()["up"], "make run")


def _unknown(flags: list[str], known: set[str], program: str) -> str:
    unknown = [flag for flag in flags if flag not in known]
    return f"{program} has no flag {unknown[0]}" if unknown else ""


def missing_files(page: Document) -> list[str]:
    """Those that are neither in the repository's root nor beside the page."""
    folders = (ROOT, (ROOT / page.name).parent)
    return [file for file in sorted(page.files()) if not any(any(folder.glob(file)) for folder in folders)]


@PAGES
def test_commands_are_there_with_their_flags(page: Document) -> None:
    assert [problem for words in page.commands() if (problem := wrong_command(words))] == []


@PAGES
def test_flags_are_there(page: Document) -> None:
    assert page.flags() - known_flags() == set()


@PAGES
def test_variables_are_there(page: Document) -> None:
    def known(variable: str) -> bool:
        if variable.endswith("_"):
            return any(one.startswith(variable) for one in known_variables())
        return variable in known_variables()

    assert [variable for variable in sorted(page.variables()) if not known(variable)] == []


@PAGES
def test_files_are_there(page: Document) -> None:
    assert missing_files(page) == []


def test_every_page_is_named_in_the_readme() -> None:
    readme = (ROOT / "README.md").read_text()
    assert [page.name for page in documents() if page.name.startswith("docs/") and page.name not in readme] == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("`sluice upp --port 1`", "sluice has no command upp"),
        ("    $ sluice up --prot 1", "sluice up has no flag --prot"),
        ("```sh\nVALUE=1 sluice keys create me \\\n  --fiel x | cat\n```", "sluice keys create has no flag --fiel"),
        ("`sluice worker --routrs h:1 -- --theirs`", "sluice worker has no flag --routrs"),
        ("`make tset`", "make has no target tset"),
        ('`make run ARGS="--prot 1"`', "make run has no flag --prot"),
        ("`python -m services.router --polcy x`", "services.router has no flag --polcy"),
        ("`python -m services.rooter`", "there is no module services.rooter"),
        ("`sluice up --port=1 -- --theirs`, `sluice keys list`, `make run ARGS=--help`, `vllm serve --x`", ""),
    ],
)
def test_what_is_wrong_is_found(text: str, problem: str) -> None:
    found = [said for words in Document("page", text).commands() if (said := wrong_command(words))]
    assert found == ([problem] if problem else [])


def test_flags_variables_and_files_that_are_not_there_are_found() -> None:
    page = Document(
        "page", "Say `--potr` or SLUICE_ROUTER_POLCY=x; see `docs/ruoter.md`, `docs/router.md`, `tests/*/x_*.py`."
    )
    assert page.flags() - known_flags() == {"--potr"}
    assert page.variables() - known_variables() == {"SLUICE_ROUTER_POLCY"}
    assert missing_files(page) == ["docs/ruoter.md", "tests/*/x_*.py"]
