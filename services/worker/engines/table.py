"""Generates the Markdown tables of engine capabilities and sampling fields from the engines' declarations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from services.common.base.errors import SluiceError
from services.worker.contract.capabilities import GUIDED, SAMPLING, Capability
from services.worker.contract.engine import LLMEngine
from services.worker.engines import find_engine, own_names
from services.worker.engines.inprocess.sampling import fields_table
from services.worker.engines.shared import sglang_fields
from services.worker.engines.vllm import fields as vllm_fields

BEGIN = "<!-- made by `sluice engines --write`; do not edit -->"
END = "<!-- end of the generated table -->"
FIELDS_BEGIN = "<!-- sampling parameters, made by `sluice engines --write`; do not edit -->"
FIELDS_END = "<!-- end of sampling parameters -->"

_IN_AND_OUT = frozenset(
    {Capability.TOKEN_IDS, Capability.TEXT, Capability.MESSAGES, Capability.PROMPT_EMBEDS, Capability.TEXT_OUT}
    | {Capability.LOGPROBS, Capability.PROMPT_LOGPROBS, Capability.EMBEDDINGS}
)
_WORKER_PROVIDED = frozenset({Capability.TEXT, Capability.MESSAGES, Capability.TEXT_OUT})
"""Capabilities that the worker provides for engines without them."""
_OPERATION = frozenset(Capability) - _IN_AND_OUT - GUIDED - SAMPLING
_GROUPS = {
    "In and out": _IN_AND_OUT,
    "Guided decoding": GUIDED,
    "Sampling and stopping": SAMPLING,
    "Placement and operation": _OPERATION,
}


def built_in_engines() -> dict[str, type[LLMEngine]]:
    """Returns the suite's engines that can be imported, by name; importing them does not import vLLM, SGLang, …"""
    engines = {}
    for name in own_names():
        try:
            engines[name] = find_engine(name)
        except SluiceError:
            continue
    return engines


def table(engines: Mapping[str, type[LLMEngine]]) -> str:
    """Returns a Markdown table with a row per capability and a column per engine."""
    lines = [_row("capability", engines), _row("---", ["---"] * len(engines))]
    for title, group in _GROUPS.items():
        lines.append(_row(f"**{title}**", [""] * len(engines)))
        lines += [
            _row(f"`{capability}`", [_cell(capability, engine) for engine in engines.values()])
            for capability in Capability
            if capability in group
        ]
    return "\n".join(lines) + "\n"


def fields_tables() -> str:
    """Returns Markdown tables of what sets each field of vLLM's and SGLang's sampling parameters."""
    tables = {
        "SamplingParams of vLLM": vllm_fields.FIELDS,
        "StructuredOutputsParams of vLLM": vllm_fields.GUIDED_FIELDS,
        "SamplingParams of SGLang": sglang_fields.FIELDS,
    }
    return "\n".join(fields_table(title, fields) for title, fields in tables.items())


def with_table(text: str) -> str:
    """Returns a document with current tables between their markers; the field tables only where their marker is."""
    text = _replace_between(text, BEGIN, END, table(built_in_engines()))
    return _replace_between(text, FIELDS_BEGIN, FIELDS_END, fields_tables()) if FIELDS_BEGIN in text else text


def _replace_between(text: str, begin: str, end: str, content: str) -> str:
    head, _, rest = text.partition(begin)
    _, _, tail = rest.partition(end)
    return f"{head}{begin}\n\n{content}\n{end}{tail}"


def write(file: Path) -> bool:
    """Updates the tables in a file; returns whether the file changed."""
    before = file.read_text("utf-8")
    after = with_table(before)
    file.write_text(after, "utf-8")
    return after != before


def _row(first: str, cells: Iterable[str]) -> str:
    return "| " + " | ".join((first, *cells)) + " |"


def _cell(capability: Capability, engine: type[LLMEngine]) -> str:
    if capability in engine.CAPABILITIES:
        return "yes"
    if capability in _WORKER_PROVIDED:
        return "worker"
    return "no effect" if capability in engine.ACCEPTED else "–"
