"""What one request may use up."""

from __future__ import annotations

from dataclasses import dataclass

from services.preprocess.template_process import TemplateProcesses


@dataclass(frozen=True)
class Limits:
    """Bounds that tokenizer implementations keep.

    Attributes:
        max_prompt_chars: longest text a template may make.
        template_s: longest that a template may run, seconds.
        foreign_templates: runs templates that did not come with the model.
    """

    max_prompt_chars: int
    template_s: float
    foreign_templates: TemplateProcesses

    @classmethod
    def default(cls) -> Limits:
        """4 Mi characters, 2 s, one process of 512 MiB that starts when first needed."""
        return cls(4 << 20, 2.0, TemplateProcesses(1, 2.0, 4 << 20, 512))
