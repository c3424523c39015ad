"""The example engine: built as a wheel, installed beside Sluice, served by its entry point, and tried by the kit."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "engine"
DEADLINE_S = 120


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the installed package, made without the network."""
    work = tmp_path_factory.mktemp("example")
    source = shutil.copytree(EXAMPLE, work / "source", ignore=shutil.ignore_patterns("__pycache__"))
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(work), str(source))
    (wheel,) = work.glob("sluice_parrot-*.whl")
    pip("install", "--no-deps", "--target", str(work / "site"), str(wheel))
    return work / "site"


def pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments[:1], "--no-index", *arguments[1:]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@asynccontextmanager
async def serving(site: Path, folder: Path, *flags: str) -> AsyncIterator[str]:
    """The address of a worker process with the engine."""
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.worker", "--engine", "parrot", "--model", f"tiny={folder}"),
        *("--listen", "127.0.0.1:0", "--grace-s", "0", *flags),
        cwd=ROOT,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(site), "SLUICE_WORKER_LOG_FORMAT": "text"},
    )
    try:
        listens = await line_with(child, "gRPC server listens")
        await line_with(child, "engine is ready")
        yield f"127.0.0.1:{listens.split('address=127.0.0.1:')[1].split()[0]}"
    finally:
        if child.returncode is None:
            child.kill()
        await child.wait()


async def line_with(child: asyncio.subprocess.Process, text: str) -> str:
    assert child.stderr is not None
    said = []
    async with asyncio.timeout(DEADLINE_S):
        while line := (await child.stderr.readline()).decode():
            said.append(line)
            if text in line:
                return line
    raise AssertionError(f"the worker ended without saying {text!r}: {''.join(said)}")


async def sluice(*arguments: str) -> tuple[int, str]:
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "sluice.cli.main", *arguments),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, "COLUMNS": "200"},
    )
    async with asyncio.timeout(DEADLINE_S):
        out, _ = await child.communicate()
    assert child.returncode is not None
    return child.returncode, out.decode()


async def test_the_example_engine_is_conformant(site: Path, folder: Path, tmp_path: Path) -> None:
    async with serving(site, folder) as address:
        code, shown = await sluice("conformance", address, "--patience", "10", "--junit", str(tmp_path / "report.xml"))
    assert code == 0, shown
    suite = ElementTree.parse(tmp_path / "report.xml").getroot()[0]
    cases = {case.attrib["name"]: case for case in suite.iter("testcase")}
    assert int(suite.attrib["tests"]) == len(cases) > 60
    assert suite.attrib["failures"] == "0"
    assert cases["max-tokens"].find("skipped") is None
    assert cases["cancel"].find("skipped") is None
    logprobs = cases["logprobs"].find("skipped")
    assert logprobs is not None
    assert logprobs.attrib["message"].startswith("not claimed: Refused: The parrot engine")
    assert "max-tokens" in shown
    assert "not claimed" in shown


async def test_a_broken_engine_is_exit_code_one(site: Path, folder: Path, tmp_path: Path) -> None:
    broken = tmp_path / "site"
    shutil.copytree(site, broken)
    speech = broken / "sluice_parrot" / "speech.py"
    text = speech.read_text()
    assert "tokens[: index + 1]" in text
    speech.write_text(text.replace("tokens[: index + 1]", "tokens[: index + 2]"))
    async with serving(broken, folder) as address:
        report = str(tmp_path / "report.xml")
        code, shown = await sluice(
            "conformance", address, "--patience", "10", "--rule", "stop-ids", "--rule", "info", "--junit", report
        )
    assert code == 1, shown
    assert "Not kept: stop-ids." in shown
    failures = list(ElementTree.parse(report).getroot().iter("failure"))
    assert len(failures) == 1
    assert "1 tokens followed the stop id." in failures[0].attrib["message"]


def test_the_page_shows_the_code_of_the_example() -> None:
    page = (ROOT / "docs" / "writing-an-engine.md").read_text()
    files = [path for path in EXAMPLE.rglob("*") if path.suffix in (".py", ".toml")]
    assert len(files) == 4
    for path in files:
        language = "toml" if path.suffix == ".toml" else "python"
        shown = f"`{path.relative_to(ROOT).as_posix()}`:\n\n```{language}\n{path.read_text()}```\n"
        assert shown in page, f"docs/writing-an-engine.md shows another {path.name}"
