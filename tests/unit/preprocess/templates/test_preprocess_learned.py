"""What a template shows is learned in a process that can be killed, and the model serves with what is known."""

from __future__ import annotations

from collections.abc import Iterator
from time import monotonic, sleep
from typing import Any

import pytest

from services.preprocess.contract.tokenizer import ChatRequest
from services.preprocess.limits import Limits
from services.preprocess.templates.capabilities import UNKNOWN
from services.preprocess.templates.learned import learned
from services.preprocess.templates.processes import ModelRunner, TemplateProcesses
from services.preprocess.tokenizers.hf import HfTokenizer
from tests.support.data.chat_templates import TEMPLATES
from tests.support.data.loaded_tokenizers import tiny_folder

LIMIT_S = 0.3
SHOWN: dict[str, dict[str, Any]] = {
    "any_role": {"developer": False, "second_system": True, "late_system": True},
    "developer": {"developer": True},
    "system_first": {"system": True, "second_system": False, "late_system": False},
    "last_system_only": {"second_system": False, "late_system": False},
    "no_system": {"system": False, "repeated_user": False, "tool_results": False, "arguments": "hidden"},
    "alternating": {"call_ids": "short", "empty_assistant": False, "user_after_tool": False},
    "ids_only": {"call_ids": "named"},
    "thinking": {"reasoning": ("thinking",), "reasoning_with_text": False, "parallel_calls": False},
    "null_content": {"null_content": True, "arguments": "text", "text_with_calls": "before"},
    "single_call": {"parallel_calls": False},
    "objects_only": {"loose_arguments": False, "tool_parameters": True},
    "no_tools": {"arguments": "hidden", "tools": False},
}
SLOW = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
UNSEEN = "{% set ns = namespace(t='a') %}{% for i in range(40) %}{% set ns.t = ns.t ~ ns.t %}{% endfor %}"
HOSTILE = {"loops": SLOW, "memory": UNSEEN}


@pytest.fixture(scope="module")
def processes() -> Iterator[TemplateProcesses]:
    made = TemplateProcesses(1, LIMIT_S, 1 << 20, 256)
    yield made
    made.close()


@pytest.mark.parametrize("name", SHOWN)
def test_template_shows_what_its_habit_leaves(processes: TemplateProcesses, name: str) -> None:
    shown = learned(processes, TEMPLATES[name], {}).as_json()
    assert {key: shown[key] for key in SHOWN[name]} == SHOWN[name]


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_probe_ends_the_learning_only(processes: TemplateProcesses, name: str) -> None:
    source = "{% if messages | length == 4 %}" + HOSTILE[name] + "{% endif %}" + TEMPLATES["any_role"]
    began = monotonic()
    tokenizer = HfTokenizer(tiny_folder(), Limits(1 << 20, LIMIT_S, processes), chat_template=source)
    assert monotonic() - began < 10 * LIMIT_S + 5
    assert tokenizer.facts.template["second_system"] is True, "learned before"
    assert tokenizer.facts.template["call_ids"] == UNKNOWN.call_ids
    assert "hi" in tokenizer.render(ChatRequest([{"role": "user", "content": "hi"}]))


class Busy:
    """Processes on a machine on which every probe has to wait, all together for longer than one may take."""

    def __init__(self, processes: TemplateProcesses, limit_s: float) -> None:
        self._processes = processes
        self.limit_s = limit_s

    def prober(self) -> ModelRunner:
        runner = self._processes.prober()
        at_once = runner.probe

        def probe(source: str, variables: dict[str, Any]) -> str:
            sleep(self.limit_s / 10)
            return at_once(source, variables)

        runner.probe = probe  # type: ignore[method-assign]
        return runner


@pytest.mark.parametrize("name", ["alternating", "thinking"])
def test_all_is_learned_on_a_busy_machine(processes: TemplateProcesses, name: str) -> None:
    source, limit_s = TEMPLATES[name] + "{# another one #}", 1.0  # of a probe, which may wait for this machine, too
    patient = TemplateProcesses(1, limit_s, 1 << 20, 256)
    try:
        began = monotonic()
        busy = learned(Busy(patient, limit_s), source, {})  # type: ignore[arg-type]
        assert monotonic() - began > 2 * limit_s, "as the test assumes"
    finally:
        patient.close()
    assert busy == learned(processes, TEMPLATES[name], {})
