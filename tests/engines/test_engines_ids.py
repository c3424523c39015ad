"""Every implementation makes the ids that the engine's own server makes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.common.base.errors import SluiceError
from services.common.packages.model_files import ModelSpec, resolve
from services.preprocess.contract.tokenizer import ChatRequest, TokenizerProtocol
from services.preprocess.engines.engine_tokenizer import EngineTokenizer
from services.preprocess.tokenizers.engine_extensions import EngineOptions
from services.preprocess.tokenizers.loading import load_tokenizer
from tests.engines.servers import SERVERS, Reference, python
from tests.support.data.chat_matrix import chats, plain_chats
from tests.support.data.loaded_tokenizers import limits
from tests.support.data.tokenizer_families import EXACT

pytestmark = pytest.mark.engines

TEKKEN = ("tekken_240718.json", "tekken_240911.json")
SENTENCEPIECE = (
    "tokenizer.model.v1",
    "mistral_instruct_tokenizer_240216.model.v2",
    "mistral_instruct_tokenizer_240323.model.v3",
    "mistral_instruct_tokenizer_241114.model.v7",
    "mistral_instruct_tokenizer_241114.model.v7m1",
)
CASES = [
    *(("vllm", name) for name in (*EXACT, *TEKKEN, *SENTENCEPIECE)),
    *(("sglang", name) for name in (*EXACT, *TEKKEN)),  # without a tokenizer.json it reads no SentencePiece model
]
EXAMPLES = 200


class Case(NamedTuple):
    """An engine and a tokenizer, and the three ways to its ids."""

    engine: str
    name: str
    server: Reference
    theirs: TokenizerProtocol
    ours: TokenizerProtocol


@pytest.fixture(scope="module", params=CASES, ids=lambda case: "-".join(case))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    engine, name = request.param
    path = EXACT[name](tmp_path_factory.mktemp(name) / name) if name in EXACT else resolve(f"mistral-common:{name}")
    ours = load_tokenizer(ModelSpec(name, str(path)), limits())
    with (
        SERVERS[engine](path) as server,
        closing(EngineTokenizer(engine, path, EngineOptions(python=python(engine)))) as theirs,
    ):
        yield Case(engine, name, server, theirs, ours)


def ids_of(tokenizer: TokenizerProtocol, body: dict[str, Any]) -> list[int] | None:
    chat = ChatRequest(
        messages=body["messages"],
        tools=body.get("tools"),
        template_kwargs=body.get("chat_template_kwargs", {}),
        add_generation_prompt=body.get("add_generation_prompt"),
        continue_final_message=body.get("continue_final_message", False),
    )
    try:
        return tokenizer.encode_chat(chat)
    except SluiceError:
        return None


def compare(server: Reference, tokenizer: TokenizerProtocol, strategy: st.SearchStrategy[dict[str, Any]]) -> int:
    """How many of at least 200 conversations the engine accepts; fails at the first with other ids."""
    accepted = 0

    @settings(
        max_examples=EXAMPLES, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(strategy)
    def each(body: dict[str, Any]) -> None:
        nonlocal accepted
        expected = server.ids(body)
        if expected is not None:
            accepted += 1
            assert ids_of(tokenizer, body) == expected, body

    each()
    return accepted


def test_engine_code_in_our_processes_produces_the_ids_of_its_server(case: Case) -> None:
    sglang = case.engine == "sglang"
    # SGLang knows add_generation_prompt only where tokens are asked for, not where they are generated.
    strategy = chats().filter(lambda body: "add_generation_prompt" not in body) if sglang else chats()
    assert compare(case.server, case.theirs, strategy) > EXAMPLES / 4


def test_sluice_code_produces_the_ids_of_the_engine(case: Case) -> None:
    sglang = case.engine == "sglang"
    # What engines add of their own to a prompt is theirs to know: SGLang writes more into tools, joins parts with
    # spaces, takes a last message of the assistant's for the user's, and with Tekken leaves out one that is blank.
    strategy = plain_chats(with_parts=False).filter(_says_something) if sglang else chats()
    if not case.ours.facts.template.get("tools", True):  # calls that the template leaves out are text in our prompt
        strategy = strategy.filter(lambda body: "tools" not in body)
    assert compare(case.server, case.ours, strategy) > EXAMPLES / 4


def _says_something(body: dict[str, Any]) -> bool:
    return all(message["content"].strip() for message in body["messages"])
