"""A side without engines: Jinja as models' templates are documented, and mistral-common, in this process."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
from mistral_common.protocol.instruct.request import ChatCompletionRequest
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer
from tokenizers import Tokenizer

from tests.certificate.sides.side import Case, Result


class PlainSide:
    """Chats that need no rule beyond the documentation of templates: contents are texts, arguments are objects."""

    name = "plain"
    version = f"jinja2 {jinja2.__version__}"
    apis = frozenset({"chat"})

    def __init__(self) -> None:
        self._cases: Sequence[Case] = ()
        self._load = cache(_Model)
        self._load_mistral = cache(lambda source: MistralTokenizer.from_file(source))

    def send(self, cases: Sequence[Case]) -> None:
        self._cases = cases

    def receive(self) -> list[Result]:
        return [self._result(case) for case in self._cases]

    def close(self) -> None:
        """Does nothing."""

    def _result(self, case: Case) -> Result:
        body = case["body"]
        texts = [message.get("content") for message in body["messages"]]
        if not all(isinstance(text, str) for text in texts) or "response_format" in body:
            return {"absent": "the documentation of templates does not say"}
        if Path(case["model"]).is_file():
            return self._mistral(case["model"], body)
        return self._load(case["model"]).prompt(body)

    def _mistral(self, model: str, body: dict[str, Any]) -> Result:
        request = ChatCompletionRequest.from_openai(messages=body["messages"], tools=body.get("tools"))
        return {"ids": self._load_mistral(model).encode_chat_completion(request).tokens}


class _Model:
    def __init__(self, folder: str) -> None:
        self._config = json.loads((Path(folder) / "tokenizer_config.json").read_text("utf-8"))
        self._tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
        environment.globals["raise_exception"] = _refuse
        self._template = environment.from_string(self._config["chat_template"])

    def prompt(self, body: dict[str, Any]) -> Result:
        try:
            text = self._template.render(
                messages=[_documented(message) for message in body["messages"]],
                tools=body.get("tools"),
                add_generation_prompt=True,
                bos_token=self._config["bos_token"],
                eos_token=self._config["eos_token"],
                **body.get("chat_template_kwargs", {}),
            )
        except (jinja2.TemplateError, ValueError) as error:
            return {"refused": str(error)}
        return {"ids": self._tokenizer.encode(text, add_special_tokens=False).ids}


def _refuse(reason: str) -> None:
    raise jinja2.TemplateError(reason)


def _documented(message: dict[str, Any]) -> dict[str, Any]:
    if not message.get("tool_calls"):
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}
