"""Reasons for other prompts of transformers."""

from __future__ import annotations

from tests.certificate.changes import unswitched
from tests.certificate.explaining import Reason
from tests.certificate.reasons.fitting import fitting, keeps_words, unread

TRANSFORMERS: tuple[Reason, ...] = (
    Reason(
        "transformers passes an effort only",
        "transformers has no rule that an effort switches thinking on; vLLM, SGLang and Sluice have.",
        "Sluice",
        "transformers",
        features=("effort",),
        change=unswitched,
    ),
    Reason(
        "transformers passes the developer's role on",
        "transformers passes the role developer to templates that print any role; Sluice and vLLM pass system.",
        "Sluice",
        "transformers",
        features=("developer",),
        holds=keeps_words,
    ),
    unread("transformers", "transformers"),
    *fitting("transformers", "transformers"),
)
