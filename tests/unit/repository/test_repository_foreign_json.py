"""JSON of foreign senders passes the front door: direct calls of a parser are listed here, with what bounds them."""

from __future__ import annotations

import re

from tests.support.repository import ROOT

_CALL = re.compile(r"\b(?:or)?json\.loads\(")
_OWN = "text that the service or its own child process wrote"
_FILE = "a file of the operator, or of a model that the operator chose"
_STORED = "what the gateway stored; its size was bounded then"
_OUTPUT = "text that a model generated, bounded by the tokens of its stream"
_GRAMMAR = "a constraint, bounded by the budgets of grammars and schemas"

DIRECT = {
    "services/common/child_rpc/process.py": _OWN,
    "services/common/child_rpc/child.py": _OWN,
    "services/common/discovery/tokenizer_check.py": _FILE,
    "services/common/net/intake/json_intake.py": "the front door",
    "services/common/net/intake/json_slices.py": "the front door",
    "services/common/packages/model_files.py": _FILE,
    "services/gateway/admission/keys.py": _FILE,
    "services/gateway/apis/anthropic/message.py": _OUTPUT,
    "services/gateway/apis/batches/records.py": _STORED,
    "services/gateway/apis/openai/structured_output.py": "a schema in a text, whose characters and nodes are counted",
    "services/gateway/http/error_formats.py": _OWN,
    "services/common/apis/responses/custom_tools.py": _OUTPUT,
    "services/gateway/http/socket_answers.py": _OWN,
    "services/gateway/pipeline/config.py": _FILE,
    "services/postprocess/detokenize/hf.py": _FILE,
    "services/postprocess/parsers/calls/argument_types.py": _OUTPUT,
    "services/postprocess/parsers/engines/host.py": _OWN,
    "services/postprocess/parsers/engines/vllm.py": _FILE,
    "services/postprocess/parsers/families/gemma.py": _OUTPUT,
    "services/postprocess/parsers/families/minimax_m3.py": _OUTPUT,
    "services/postprocess/parsers/isolated/wire.py": _OWN,
    "services/postprocess/parsers/calls/objects.py": _OUTPUT,
    "services/postprocess/parsers/calls/tagged.py": _OUTPUT,
    "services/preprocess/encoders/hf.py": _FILE,
    "services/preprocess/engines/host.py": _OWN,
    "services/preprocess/engines/image_processor.py": _OWN,
    "services/preprocess/engines/process.py": _OWN,
    "services/preprocess/media/checking.py": _OWN,
    "services/preprocess/service.py": "arguments of a template that have passed the front door",
    "services/preprocess/templates/child.py": _OWN,
    "services/preprocess/templates/lane.py": _OWN,
    "services/preprocess/tokenizers/placeholders.py": _FILE,
    "services/router/registration/name_pins.py": "a record in the store that a router wrote",
    "services/router/scheduling/policies/isolated/wire.py": _OWN,
    "services/router/state/workers/worker.py": "a record in the store that a router wrote",
    "services/worker/engines/mock/guided.py": _GRAMMAR,
    "services/worker/engines/mock/timing.py": _FILE,
    "services/worker/engines/openai/body.py": _GRAMMAR,
    "services/worker/engines/shared/arguments.py": "a flag of the operator",
    "services/worker/engines/transformers/guidance.py": _GRAMMAR,
    "services/worker/engines/transformers/lora.py": _FILE,
    "services/worker/engines/vllm/clip_child.py": _OWN,
    "services/worker/engines/vllm/clip_decoding.py": _OWN,
    "services/worker/engines/vllm_grpc/card.py": "defaults of the engine that the operator chose, read once",
    "services/worker/engines/vllm_grpc/media.py": _FILE,
    "services/worker/generation/validation.py": _GRAMMAR,
}
"""Why each module that calls a parser directly may; all others use `services.common.net.intake`."""


def test_module_that_parses_json_past_the_front_door_has_a_reason() -> None:
    found = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "services").rglob("*.py")
        if any(_CALL.search(line.partition("#")[0]) for line in path.read_text().splitlines())
    }
    assert found == DIRECT.keys()
