"""Coding agents from npm, run unmodified against a gateway, each with a home folder of its own."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
from abc import ABC, abstractmethod
from base64 import b64encode
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.data.model_shapes import DEFAULT

WITHIN_S = 180


def script(text: str) -> str:
    """What makes the mock engine generate this text, wherever it is in the prompt."""
    return f"<<<script64: {b64encode(text.encode()).decode()}>>>"


class Agent(ABC):
    """An agent's command line.

    Args:
        folder: where npm has installed it.
        home: its home folder, created if needed.
        work: the folder it works in.
    """

    command = ""

    def __init__(self, folder: Path, home: Path, work: Path) -> None:
        self.binary = folder / "node_modules" / ".bin" / self.command
        self.home = home
        self.work = work
        home.mkdir(parents=True, exist_ok=True)
        work.mkdir(parents=True, exist_ok=True)
        self.shape = DEFAULT
        self.model = DEFAULT.name
        self.url = ""
        self._calls = itertools.count()

    @abstractmethod
    def arguments(self, prompt: str, resume: bool) -> list[str]:
        """Of a run that ends after its answer."""

    @abstractmethod
    def environment(self) -> dict[str, str]:
        """Variables that lead it to the gateway."""

    @abstractmethod
    def run_command(self, command: str) -> str:
        """A call of its shell tool, as the model generates it."""

    @abstractmethod
    def edit(self, file: Path, old: str, new: str, answer: str) -> str:
        """Prepares the replacement of a text in a file, and then an answer; returns the prompt."""

    def call(self, tool: str, **arguments: Any) -> str:
        """The next call of the session, as the model generates it."""
        return self.shape.call(next(self._calls), tool, arguments)

    def says(self, answer: str) -> str:
        """What makes the model give this answer."""
        return script(self.shape.answer(answer))

    def start(self, prompt: str, resume: bool = False) -> subprocess.Popen[str]:
        """Starts a run."""
        inherited = {name: value for name, value in os.environ.items() if name in ("PATH", "LANG", "TMPDIR")}
        return subprocess.Popen(
            [str(self.binary), *self.arguments(prompt, resume)],
            cwd=self.work,
            env={**inherited, "HOME": str(self.home), **self.environment()},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def ask(self, prompt: str, resume: bool = False) -> str:
        """The final answer of a run; fails with its output if the exit code is not 0."""
        process = self.start(prompt, resume)
        try:
            output, errors = process.communicate(timeout=WITHIN_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, errors = process.communicate()
            raise AssertionError(f"{self.command} did not end:\n{output[-2000:]}\n{errors[-2000:]}") from None
        assert process.returncode == 0, f"{self.command}: {output[-2000:]}\n{errors[-2000:]}"
        return output

    def steps(self, calls: Sequence[str], answer: str) -> str:
        """Prepares a tool loop and returns its prompt: the output of each call contains the script of the next step.

        Args:
            calls: shell commands.
        """
        first = script(self.run_command(f"{calls[0]}; cat step0.txt"))
        followers = [*calls[1:], None]
        for number, follower in enumerate(followers):
            following = f"{follower}; cat step{number + 1}.txt"
            text = self.says(answer) if follower is None else script(self.run_command(following))
            (self.work / f"step{number}.txt").write_text(f"{text}\n")
        return f"Work: {first}"


class FileTools(Agent):
    """An agent that has tools to read and to edit a file, and must read it first."""

    edit_names = ("", "", "", "", "")
    """Of the tools read and edit, and of the arguments file, old and new text."""

    def edit(self, file: Path, old: str, new: str, answer: str) -> str:
        read, edit, path, before, after = self.edit_names
        look = self.call(read, **{path: str(file)})
        # The file's content, which the model reads, has the script of the edit; the new text has that of the answer.
        change = self.call(edit, **{path: str(file), before: old, after: f"{new} {self.says(answer)}"})
        file.write_text(f"{file.read_text()}{script(change)}\n")
        return f"Edit: {script(look)}"


class Codex(Agent):
    """OpenAI's Codex CLI, over the Responses API."""

    command = "codex"

    def arguments(self, prompt: str, resume: bool) -> list[str]:
        where = {
            "model": self.model,
            "model_provider": "sluice",
            "model_providers.sluice.name": "Sluice",
            "model_providers.sluice.base_url": f"{self.url}/v1",
            "model_providers.sluice.wire_api": "responses",
            **self.configuration,
        }
        flags = [part for name, value in where.items() for part in ("-c", f"{name}={json.dumps(value)}")]
        session = ["resume", "--last"] if resume else []
        return [
            *("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"),
            *flags,
            *session,
            prompt,
        ]

    def __init__(self, folder: Path, home: Path, work: Path) -> None:
        super().__init__(folder, home, work)
        self.configuration: dict[str, Any] = {}

    def environment(self) -> dict[str, str]:
        return {"CODEX_HOME": str(self.home), "RUST_LOG": "error"}

    def run_command(self, command: str) -> str:
        return self.call("exec_command", cmd=command)

    def edit(self, file: Path, old: str, new: str, answer: str) -> str:
        # The patch, which stays in the history, has the script of the answer.
        change = f"@@\n-{old}\n+{new} {self.says(answer)}\n"
        patch = f"*** Begin Patch\n*** Update File: {file.name}\n{change}*** End Patch"
        command = f"apply_patch <<'EOF'\n{patch}\nEOF\n"
        return f"Edit: {script(self.run_command(command))}"


class ClaudeCode(FileTools):
    """Anthropic's Claude Code, over the Messages API."""

    command = "claude"
    edit_names = ("Read", "Edit", "file_path", "old_string", "new_string")

    def arguments(self, prompt: str, resume: bool) -> list[str]:
        session = ["--continue"] if resume else []
        return [*session, "--allowedTools", "Bash,Read,Edit,Write", "-p", prompt]

    def environment(self) -> dict[str, str]:
        return {
            "ANTHROPIC_BASE_URL": self.url,
            "ANTHROPIC_AUTH_TOKEN": "unused",
            "ANTHROPIC_MODEL": self.model,
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": self.model,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_AUTOUPDATER": "1",
        }

    def run_command(self, command: str) -> str:
        return self.call("Bash", command=command, description="A step.")


class OpenCode(FileTools):
    """OpenCode, over chat completions."""

    command = "opencode"
    edit_names = ("read", "edit", "filePath", "oldString", "newString")

    def arguments(self, prompt: str, resume: bool) -> list[str]:
        session = ["--continue"] if resume else []
        return ["run", "--model", f"sluice/{self.model}", *session, prompt]

    def environment(self) -> dict[str, str]:
        provider = {
            "npm": "@ai-sdk/openai-compatible",
            "name": "Sluice",
            "options": {"baseURL": f"{self.url}/v1", "apiKey": "unused"},
            "models": {self.model: {"name": self.model, "limit": {"context": 131_072, "output": 8_192}}},
        }
        configuration = {
            "provider": {"sluice": provider},
            "small_model": f"sluice/{self.model}",
            "permission": "allow",
            "autoupdate": False,
            "share": "disabled",
        }
        return {
            "OPENCODE_CONFIG_CONTENT": json.dumps(configuration),
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
            "XDG_DATA_HOME": str(self.home / "data"),
            "XDG_CONFIG_HOME": str(self.home / "config"),
            "XDG_STATE_HOME": str(self.home / "state"),
            "XDG_CACHE_HOME": str(self.home / "cache"),
        }

    def run_command(self, command: str) -> str:
        return self.call("bash", command=command, description="A step.")
