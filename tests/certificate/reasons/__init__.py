"""The known reasons of differences, as data; one that explains nothing fails a whole run."""

from __future__ import annotations

from tests.certificate.explaining import Reason
from tests.certificate.reasons.answers import ANSWERS
from tests.certificate.reasons.prompts_sglang import SGLANG
from tests.certificate.reasons.prompts_transformers import TRANSFORMERS
from tests.certificate.reasons.prompts_vllm import VLLM

REASONS: tuple[Reason, ...] = (*VLLM, *SGLANG, *TRANSFORMERS, *ANSWERS)
