"""Sluice's side: from a client's body to token ids, and from token ids to an answer, in this process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import orjson

from services.common.base.errors import SluiceError
from services.common.packages.model_files import ModelSpec
from services.gateway.core.request import ChatPrompt, GenerationRequest, TextPrompt
from services.postprocess.detokenize.stream import FinishReason, Limits, StreamOptions
from services.postprocess.detokenize.vocabulary import Vocabulary
from services.postprocess.streams.factory import StreamFactory
from services.postprocess.streams.vocabulary_registry import load
from services.preprocess.contract.tokenizer import ChatRequest, TokenizerProtocol
from services.preprocess.contract.validation import parse_chat
from services.preprocess.limits import Limits as PromptLimits
from services.preprocess.tokenizers.loading import load_tokenizer
from tests.certificate.bodies import PATHS
from tests.certificate.sides.side import Case, Result
from tests.support.data.bodies import read
from tests.support.oracles.parsing import said

_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}


class SluiceSide:
    """The domain code of the gateway, preprocess and postprocess, without their processes."""

    name = "sluice"
    version = "sluice"
    apis = frozenset(PATHS)

    def __init__(self) -> None:
        self._limits = PromptLimits.default()
        self._streams = StreamFactory(Limits())
        self._cases: Sequence[Case] = ()
        self.tokenizer = cache(self._load_tokenizer)
        self.vocabulary = cache(self._load_vocabulary)

    def _load_tokenizer(self, model: str) -> TokenizerProtocol:
        return load_tokenizer(ModelSpec("m", model), self._limits)

    def _load_vocabulary(self, model: str) -> Vocabulary:
        return load(ModelSpec("m", model))

    def send(self, cases: Sequence[Case]) -> None:
        self._cases = cases

    def receive(self) -> list[Result]:
        return [self._result(case) for case in self._cases]

    def close(self) -> None:
        """Does nothing."""

    def _result(self, case: Case) -> Result:
        try:
            return self._prompt(case) if case["kind"] == "prompt" else asyncio.run(self._answer(case))
        except SluiceError as error:
            return {"refused": error.message}

    def changed(self, case: Case, changes: Iterable[Callable[[ChatRequest], ChatRequest]]) -> list[int] | None:
        """Returns the ids of a prompt's case after changes of its chat; None if it is refused then."""
        try:
            request = read(PATHS[case["api"]], orjson.dumps(case["body"]))
            assert isinstance(request, GenerationRequest)
            assert isinstance(request.prompt, ChatPrompt)
            chat = _chat(request.prompt)
            for change in changes:
                chat = change(chat)
            return self.tokenizer(case["model"]).encode_chat(chat)
        except SluiceError:
            return None

    def _prompt(self, case: Case) -> Result:
        request = read(PATHS[case["api"]], orjson.dumps(case["body"]))
        if isinstance(request, list):
            (request,) = request
        assert isinstance(request, GenerationRequest)
        tokenizer = self.tokenizer(case["model"])
        guided = request.guided
        schema = guided.grammar if guided is not None and guided.kind == "json_schema" else ""
        return {
            "ids": _ids(tokenizer, request.prompt),
            "schema": json.loads(str(schema)) if schema else None,
            "degraded": list(request.degraded),
        }

    async def _answer(self, case: Case) -> Result:
        vocabulary = self.vocabulary(case["model"])
        options = StreamOptions(
            "m",
            tool_parser=case["tool"],
            reasoning_parser=case["reasoning"],
            tools_json=json.dumps(case["tools"]).encode() if case["tools"] else b"",
            eos_token_ids=frozenset([case["eos"]]),
            template_kwargs_json=json.dumps(case["kwargs"]).encode(),
        )
        ends = [case["eos"]] if case["finish"] == "stop" else []
        events, finish = await self._streams.parse(
            [*case["ids"], *ends], options, vocabulary, _REASONS[case["finish"]], "request"
        )
        answer = said(events)
        return {
            "content": answer.content,
            "reasoning": answer.reasoning,
            "calls": {str(place): [name, text] for place, (name, text, _) in enumerate(answer.calls)},
            "finish": finish.reason.name.lower(),
            "reasoning_tokens": finish.reasoning_tokens,
            "degraded": sorted(answer.degraded),
        }


def _ids(tokenizer: TokenizerProtocol, prompt: Any) -> list[int]:
    if isinstance(prompt, TextPrompt):
        return tokenizer.encode_text(prompt.text, prompt.add_special_tokens)
    assert isinstance(prompt, ChatPrompt)
    return tokenizer.encode_chat(_chat(prompt))


def _chat(prompt: ChatPrompt) -> ChatRequest:
    return parse_chat(
        prompt.messages_json,
        prompt.tools_json,
        prompt.template_kwargs_json,
        prompt.documents_json,
        prompt.tool_choice_json,
        chat_template=prompt.chat_template,
        add_generation_prompt=prompt.add_generation_prompt,
        continue_final_message=prompt.continue_final_message,
        media=prompt.media,
    )
