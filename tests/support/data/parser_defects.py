"""Puts known defects of other systems' postprocessing back into a copy of this one, and sees a test fail on each.

    python -m tests.support.data.parser_defects            # all of them, a few minutes
    python -m tests.support.data.parser_defects emoji

The defects are those that made other gateways corrupt, drop or delay what a model said; see docs/parsers.md.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.repository import ROOT

COPIED = ("services", "sluice", "tests", "pyproject.toml")
UNIT = "tests/unit/postprocess"
PARSERS, STREAM_MANAGER = (
    f"{UNIT}/parsers/test_postprocess_parsers.py",
    "tests/unit/gateway/streams/test_gateway_stream_manager.py",
)


@dataclass(frozen=True)
class Defect:
    """What is wrong, how it is put back, and the test that fails on it.

    Attributes:
        file: of the code.
        good, bad: what stands there, once, and what stands there with the defect.
        test: as pytest names it.
    """

    what: str
    file: str
    good: str
    bad: str
    test: str


DEFECTS: dict[str, Defect] = {
    "delta": Defect(
        "more than one token in a delta corrupts tool calls",
        "services/postprocess/parsers/calls/parser.py",
        "while self._buffer and self._step(events):\n            pass",
        "if self._buffer:\n            self._step(events)",
        f"{UNIT}/parsers/test_postprocess_parsers_invariance.py::test_any_split_of_any_answer_parses_the_same[hermes]",
    ),
    "delta-reasoning": Defect(
        "more than one token in a delta corrupts reasoning",
        "services/postprocess/parsers/reasoning/think.py",
        "        if self._state == _THINKING:\n            self._think(events)",
        "        elif self._state == _THINKING:\n            self._think(events)",
        f"{UNIT}/parsers/test_postprocess_parsers_invariance.py::test_any_split_of_any_answer_parses_the_same[think]",
    ),
    "parallel": Defect(
        "parallel tool calls are dropped",
        "services/postprocess/parsers/calls/call_names.py",
        "not (self._context.single and self.count)",
        "not self.count",
        f"{PARSERS}::test_parallel_calls_with_the_arguments_as_written",
    ),
    "one-delta": Defect(
        "`</think>` and `<tool_call>` in one delta: the call is told as content",
        "services/postprocess/parsers/base.py",
        "if isinstance(event, Content):\n                events += self._second.feed(event.text)",
        "if isinstance(event, Content) and len(found) == 1:\n                events += self._second.feed(event.text)",
        f"{PARSERS}::test_reasoning_and_call_in_one_piece",
    ),
    "withheld": Defect(
        "arguments are withheld until the call ends",
        "services/postprocess/parsers/calls/parser.py",
        "            pass\n        return events",
        "            pass\n        late = self.__dict__.setdefault('late', [])\n        late += events\n"
        "        if self._index >= 0:\n            return []\n        self.late = []\n        return late",
        f"{PARSERS}::test_arguments_are_streamed_before_they_are_complete",
    ),
    "emoji": Defect(
        "a character of several tokens comes out as replacement characters",
        "services/postprocess/detokenize/detokenizer.py",
        "text, used = utf_8_decode(data, self._table.errors)",
        'text, used = utf_8_decode(data, "replace", True)',
        f"{UNIT}/detokenize/test_postprocess_detokenizer.py::test_a_character_of_many_tokens_comes_out_whole",
    ),
    "stop": Defect(
        "a stop string found after detokenizing does not stop the engine",
        "services/gateway/streams/running.py",
        "if worker is not None:",
        "if worker is not None and end.finish is None:",
        f"{STREAM_MANAGER}::test_a_stop_string_stops_the_engine",
    ),
    "thinking-off": Defect(
        "the reasoning parser runs although thinking was switched off",
        "services/postprocess/parsers/reasoning/think.py",
        "closed = tail.endswith((self.end, *self.more_ends))",
        "closed = False",
        f"{PARSERS}::test_whether_the_model_thinks_is_seen_in_the_prompt_and_the_answer",
    ),
    "choice-none": Defect(
        "tool_choice none is not enforced",
        "services/postprocess/streams/parser_selection.py",
        "if choice == NONE or options.guided:",
        "if options.guided:",
        f"{UNIT}/streams/test_postprocess_parsed.py::test_no_calls_where_none_are_wanted",
    ),
    "guided": Defect(
        "guided output lands in reasoning",
        "services/postprocess/parsers/reasoning/think.py",
        'constrained = self.context.guided and begun[0] in "{["',
        "constrained = False",
        f"{PARSERS}::test_guided_output_is_never_reasoning",
    ),
}


def put_back(defect: Defect, root: Path) -> None:
    """Writes the defect into the code under `root`; ValueError when the code is not what it was."""
    file = root / defect.file
    text = file.read_text("utf-8")
    if text.count(defect.good) != 1:
        raise ValueError(f"{defect.file} does not have once: {defect.good}")
    file.write_text(text.replace(defect.good, defect.bad), "utf-8")


def passes(defect: Defect, root: Path) -> bool:
    """Runs the defect's test on the code under `root`."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", defect.test]
    environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    if done.returncode not in (0, 1):
        raise RuntimeError(f"{defect.test} cannot be run:\n{done.stdout}{done.stderr}")
    return done.returncode == 0


def main(chosen: Sequence[str]) -> int:
    """Tries the defects; 1 when a test does not notice one."""
    unnoticed = 0
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, root / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, root / name)
        for name in chosen or DEFECTS:
            defect = DEFECTS[name]
            original = (root / defect.file).read_text("utf-8")
            put_back(defect, root)
            noticed = not passes(defect, root)
            (root / defect.file).write_text(original, "utf-8")
            unnoticed += not noticed
            print(f"{name:<16} {'noticed' if noticed else 'NOT NOTICED'}  {defect.test}", flush=True)
    print(f"{len(chosen or DEFECTS)} defects, {unnoticed} not noticed")
    return int(unnoticed > 0)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
