"""The endpoint /inference/v1/generate: token ids in, token ids out.

It is a completion of token ids whose answer has token ids in place of text: prompts are not tokenized; stop strings,
prefix caches, log-probabilities and migrations are those of completions.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import replace
from typing import Any

from services.common.base.errors import SluiceError
from services.gateway.apis.generate.response import Generated, TokenFormat
from services.gateway.apis.generate.schemas import CLIENT_NAMES, SAMPLING, GenerateTokensRequest, TokensRequest
from services.gateway.apis.openai.openapi import GENERATING, responses
from services.gateway.apis.openai.operations import OpenAIOperations
from services.gateway.apis.openai.translate import completion_requests
from services.gateway.apis.openai.unsupported_fields import fields_without_effect
from services.gateway.apis.openai.validation import check
from services.gateway.apis.parts import ApiParts
from services.gateway.apis.routes import ApiRoutes
from services.gateway.core.request import GenerationRequest, no_effect
from services.gateway.http.body_budgets import BodyBudgets
from services.gateway.operations.field_names import FieldNameMap
from services.gateway.operations.operation import Answer, Caller
from services.gateway.settings import GatewaySettings

_NAMES = FieldNameMap(CLIENT_NAMES)
_AS_IDS = {"return_token_ids": True, "return_tokens_as_token_ids": True}


class GenerateOperation:
    """Runs prompts of token ids.

    Args:
        completions: runs the requests.
    """

    def __init__(self, completions: OpenAIOperations, settings: GatewaySettings) -> None:
        self._completions = completions
        self._settings = settings

    async def generate(self, body: dict[str, Any], caller: Caller) -> Answer | None:
        """Generate token ids after token ids."""
        given = check(GenerateTokensRequest, body, self._settings.budgets)
        name = TokenFormat.id_prefix + secrets.token_hex(12)
        fields, generations = translated(body, name, self._settings.max_choices, self._settings.budgets)
        reasons = tuple(map(no_effect, fields_without_effect(given)))
        generations = [replace(generation, degraded=reasons) for generation in generations]
        form = TokenFormat(name, int(time.time()), fields.model, fields.include_usage, given.request_id or name)
        try:
            return await self._completions.respond(caller, generations, form, fields)
        except SluiceError as error:
            raise _NAMES.rename(error) from None


def translated(
    body: dict[str, Any], name: str, max_choices: int, budgets: BodyBudgets
) -> tuple[TokensRequest, list[GenerationRequest]]:
    """Returns the completion that a body stands for, and its generation request.

    Raises:
        SluiceError: INVALID_ARGUMENT for invalid or unsupported fields.
    """
    shared = {key: value for key, value in body.items() if key in _SHARED}
    sampling = {key: value for key, value in body["sampling_params"].items() if key in SAMPLING}
    completion = {**shared, **sampling, "prompt": body["token_ids"], **_AS_IDS}
    try:
        fields = check(TokensRequest, completion, budgets)
        generations = completion_requests(fields, name, max_choices, budgets)
    except SluiceError as error:
        raise _NAMES.rename(error) from None
    if fields.max_tokens is None:  # as many as fit, as vLLM decides here
        generations = [replace(each, stop=replace(each.stop, max_tokens=None)) for each in generations]
    return fields, generations


_SHARED = frozenset(
    ("model", "stream", "stream_options", "request_id", "cache_salt", "priority", "lora_path", "vllm_xargs", "user")
)


def add_api(parts: ApiParts, routes: ApiRoutes) -> None:
    """Adds the route."""
    answers = responses(Generated, GENERATING, streams=True)
    operation = GenerateOperation(parts.openai, parts.settings)
    routes.add("/inference/v1/generate", operation.generate, answers, tag="Tokens", body=GenerateTokensRequest)
