"""What one request may use up."""

from __future__ import annotations

from dataclasses import dataclass

from services.preprocess.templates.processes import TemplateProcesses
from services.preprocess.templates.runner import InThisProcess, TemplateRunner


@dataclass(frozen=True)
class Limits:
    """Bounds that tokenizer implementations keep.

    Attributes:
        max_prompt_chars: longest text a template may make.
        template_s: longest that a template may run, seconds.
        foreign_templates: runs templates that the operator did not install.
        trust_worker_templates: templates of models that were learned from workers run in this process.
    """

    max_prompt_chars: int
    template_s: float
    foreign_templates: TemplateProcesses
    trust_worker_templates: bool = False

    @classmethod
    def default(cls) -> Limits:
        """4 Mi characters, 2 s, one process of 512 MiB that starts when first needed."""
        return cls(4 << 20, 2.0, TemplateProcesses(1, 2.0, 4 << 20, 512))

    def own_templates(self, model: str, learned: bool) -> TemplateRunner:
        """Where a model's own templates run.

        Args:
            model: its served name.
            learned: they came from a worker, not from the operator.
        """
        if learned and not self.trust_worker_templates:
            return self.foreign_templates.of_model(model)
        return InThisProcess(self.template_s, self.max_prompt_chars)
