"""Limits of one request, and where its templates run."""

from __future__ import annotations

from dataclasses import dataclass

from services.preprocess.templates.processes import TemplateProcesses
from services.preprocess.templates.runner import InThisProcess, TemplateRunner

MAX_WORK_S = 10.0
"""Seconds that a request waits and runs, fewer than the gateway waits; then DEADLINE_EXCEEDED."""
MAX_TEMPLATE_S = 2.0
"""Seconds that a chat template runs; with more, its request is refused, code `chat_template`."""
MAX_TEMPLATE_MEMORY_MB = 512
"""MiB of address space of a process that runs foreign templates; with more, their request is refused."""


@dataclass(frozen=True)
class Limits:
    """Limits enforced by tokenizer implementations.

    Attributes:
        max_prompt_chars: maximum length of a template's output, characters.
        template_s: maximum run time of a template, seconds.
        foreign_templates: runs templates that the operator did not install.
    """

    max_prompt_chars: int
    template_s: float
    foreign_templates: TemplateProcesses

    @classmethod
    def default(cls) -> Limits:
        """Returns limits of 4 Mi characters, 2 s, and one template process of 512 MiB, started on first use."""
        return cls(4 << 20, MAX_TEMPLATE_S, TemplateProcesses(1, MAX_TEMPLATE_S, 4 << 20, MAX_TEMPLATE_MEMORY_MB))

    def own_templates(self, model: str, learned: bool) -> TemplateRunner:
        """Returns the runner of a model's own templates.

        Args:
            model: its served name.
            learned: whether they came from a worker rather than the operator.
        """
        if learned:
            return self.foreign_templates.of_model(model)
        return InThisProcess(self.template_s, self.max_prompt_chars)
