"""What each engine honours, as a table made from the engines' own declarations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from services.common.errors import SluiceError
from services.worker.contract.capabilities import GUIDED, SAMPLING, Capability
from services.worker.contract.engine import LLMEngine
from services.worker.engines import BUILT_IN, find_engine
from services.worker.engines.sglang import fields as sglang_fields
from services.worker.engines.shared.sampling_fields import fields_table
from services.worker.engines.vllm import fields as vllm_fields

BEGIN = "<!-- made by `sluice engines --write`; do not edit -->"
END = "<!-- end of what is made -->"
FIELDS_BEGIN = "<!-- sampling parameters, made by `sluice engines --write`; do not edit -->"
FIELDS_END = "<!-- end of sampling parameters -->"

_IN_AND_OUT = frozenset(
    {Capability.TOKEN_IDS, Capability.TEXT, Capability.MESSAGES, Capability.PROMPT_EMBEDS, Capability.TEXT_OUT}
    | {Capability.LOGPROBS, Capability.PROMPT_LOGPROBS, Capability.EMBEDDINGS}
)
_BESIDE = frozenset({Capability.TEXT, Capability.MESSAGES, Capability.TEXT_OUT})
"""What the worker does itself, whatever the engine."""
_OPERATION = frozenset(Capability) - _IN_AND_OUT - GUIDED - SAMPLING
_GROUPS = {
    "In and out": _IN_AND_OUT,
    "Guided decoding": GUIDED,
    "Sampling and stopping": SAMPLING,
    "Placement and operation": _OPERATION,
}


def built_in_engines() -> dict[str, type[LLMEngine]]:
    """Those whose module is there, by name; none of them imports its engine's package for this."""
    found = {}
    for name in BUILT_IN:
        try:
            found[name] = find_engine(name)
        except SluiceError:
            continue
    return found


def table(engines: Mapping[str, type[LLMEngine]]) -> str:
    """Markdown: a line a capability, a column an engine."""
    lines = [_line("capability", engines), _line("---", ["---"] * len(engines))]
    for title, group in _GROUPS.items():
        lines.append(_line(f"**{title}**", [""] * len(engines)))
        lines += [
            _line(f"`{capability}`", [_cell(capability, engine) for engine in engines.values()])
            for capability in Capability
            if capability in group
        ]
    return "\n".join(lines) + "\n"


def fields_tables() -> str:
    """Markdown: what sets each field of vLLM's and SGLang's sampling parameters."""
    tables = {
        "SamplingParams of vLLM": vllm_fields.FIELDS,
        "StructuredOutputsParams of vLLM": vllm_fields.GUIDED_FIELDS,
        "SamplingParams of SGLang": sglang_fields.FIELDS,
    }
    return "\n".join(fields_table(title, fields) for title, fields in tables.items())


def with_table(text: str) -> str:
    """A document with the tables of today between their marks; a document without the marks of one is given none."""
    text = _between(text, BEGIN, END, table(built_in_engines()))
    return _between(text, FIELDS_BEGIN, FIELDS_END, fields_tables()) if FIELDS_BEGIN in text else text


def _between(text: str, begin: str, end: str, made: str) -> str:
    head, _, rest = text.partition(begin)
    _, _, tail = rest.partition(end)
    return f"{head}{begin}\n\n{made}\n{end}{tail}"


def write(file: Path) -> bool:
    """Puts the table of today into a file; True when that changed it."""
    before = file.read_text("utf-8")
    after = with_table(before)
    file.write_text(after, "utf-8")
    return after != before


def _line(first: str, cells: Iterable[str]) -> str:
    return "| " + " | ".join((first, *cells)) + " |"


def _cell(capability: Capability, engine: type[LLMEngine]) -> str:
    if capability in engine.CAPABILITIES:
        return "yes"
    if capability in _BESIDE:
        return "worker"
    return "no effect" if capability in engine.ACCEPTED else "–"
