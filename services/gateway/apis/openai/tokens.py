"""The endpoints /tokenize, /detokenize and /v1/chat/completions/render, which do not generate."""

from __future__ import annotations

import secrets
from dataclasses import asdict
from typing import Any

import orjson

from services.common.base.errors import SluiceError, invalid
from services.common.base.packing import pack_u32, unpack_u32
from services.common.observability import telemetry
from services.common.types.media.parts import take_media
from services.gateway.apis.openai.completion_objects import ChatFormat
from services.gateway.apis.openai.schema_meter import SchemaMeter
from services.gateway.apis.openai.schemas import ChatCompletionRequest
from services.gateway.apis.openai.token_schemas import DetokenizeRequest, TokenizeRequest
from services.gateway.apis.openai.translate import chat_request, count_tools
from services.gateway.apis.openai.validation import check
from services.gateway.backends.workers.registry import WorkerEntry
from services.gateway.core import context
from services.gateway.core.request import ChatPrompt, GenerationRequest, Prompt, TextPrompt, TokenizedPrompt
from services.gateway.http.body_budgets import BodyBudgets
from services.gateway.operations.field_names import FieldNameMap
from services.gateway.operations.media import check_media, with_media
from services.gateway.operations.operation import Caller, Whole
from services.gateway.pipeline.models import Pipelines
from services.gateway.settings import GatewaySettings

_FIELD_NAMES = FieldNameMap({"token_ids": "tokens"})


class TokenOperations:
    """Operations served by preprocess alone, without workers."""

    def __init__(self, pipelines: Pipelines, settings: GatewaySettings) -> None:
        self._pipelines = pipelines
        self._settings = settings
        self._budgets = settings.budgets

    async def tokenize(self, body: dict[str, Any], caller: Caller) -> Whole:
        """Tokenize a prompt or a chat."""
        fields = check(TokenizeRequest, body, self._budgets)
        count_tools(fields.tools, SchemaMeter(self._budgets))
        entry = self._entry(fields.model)
        parts = await with_media(body.get("messages"), _prompt, body, fields, self._budgets)
        with telemetry.stage(
            "gateway.tokenize", parent=telemetry.carrier_of_headers(caller.headers), model=entry.model
        ):
            prompt = await self._tokens(entry, parts)
            texts = None
            if fields.return_token_strs:
                texts = await self._pipelines.preprocess.token_texts(entry.model, prompt.token_ids)
        return Whole(
            {
                "count": prompt.length,
                "max_model_len": prompt.context_limit(entry.context_length),
                "tokens": unpack_u32(prompt.token_ids).tolist(),
                "token_strs": texts,
            }
        )

    async def detokenize(self, body: dict[str, Any], caller: Caller) -> Whole:
        """Return the text of token ids."""
        fields = check(DetokenizeRequest, body, self._budgets)
        entry = self._entry(fields.model)
        with telemetry.stage(
            "gateway.detokenize", parent=telemetry.carrier_of_headers(caller.headers), model=entry.model
        ):
            await _charge(len(fields.tokens))
            try:
                text = await self._pipelines.preprocess.detokenize(
                    entry.model, pack_u32(fields.tokens), skip_special_tokens=False
                )
            except SluiceError as error:
                raise _FIELD_NAMES.rename(error) from None
        return Whole({"prompt": text})

    async def render(self, body: dict[str, Any], caller: Caller) -> Whole:
        """Render a chat completion as its worker would receive it."""
        fields = check(ChatCompletionRequest, body, self._budgets)
        request_id = ChatFormat.id_prefix + secrets.token_hex(12)
        generation = await with_media(
            body["messages"], chat_request, body, fields, request_id, self._settings.max_choices, self._budgets
        )
        assert isinstance(generation.prompt, ChatPrompt)
        entry = self._pipelines.registry.model(generation.model)
        with telemetry.stage("gateway.render", parent=telemetry.carrier_of_headers(caller.headers), model=entry.model):
            prompt = await self._tokens(entry, generation.prompt)
            text = await self._pipelines.preprocess.render(entry.model, generation.prompt)
        return Whole(
            {
                "request_id": request_id,
                "model": generation.model,
                "token_ids": unpack_u32(prompt.token_ids).tolist(),
                "prompt": text,
                "sampling_params": _sampling(generation, prompt),
                "max_model_len": prompt.context_limit(entry.context_length),
                "stream": bool(fields.stream),
            }
        )

    def _entry(self, model: str | None) -> WorkerEntry:
        """Returns the entry of the named model, or of the only served model."""
        if model is not None:
            return self._pipelines.registry.model(model)
        entries = list(self._pipelines.registry.models.values())
        if len(entries) != 1:
            raise invalid("Missing required parameter: model.", param="model", code="missing_required_parameter")
        context.current().permit.check_model(entries[0].model)
        return entries[0]

    async def _tokens(self, entry: WorkerEntry, prompt: Prompt) -> TokenizedPrompt:
        check_media(self._pipelines.registry, entry.model, prompt)
        tokenized = await self._pipelines.preprocess.tokenize(entry.model, prompt)
        await _charge(tokenized.length)
        return tokenized


async def _charge(tokens: int) -> None:
    permit = context.current().permit
    await permit.charge(tokens)
    permit.spent(tokens)


def _prompt(body: dict[str, Any], fields: TokenizeRequest, budgets: BodyBudgets) -> Prompt:
    if fields.prompt is not None:
        return TextPrompt(fields.prompt, fields.add_special_tokens)
    messages, media = take_media(body["messages"], budgets.media)
    return ChatPrompt(
        messages_json=orjson.dumps(messages),
        tools_json=b"" if fields.tools is None else orjson.dumps(body["tools"]),
        template_kwargs_json=b"" if fields.chat_template_kwargs is None else orjson.dumps(fields.chat_template_kwargs),
        chat_template=fields.chat_template or "",
        add_generation_prompt=fields.add_generation_prompt,
        continue_final_message=bool(fields.continue_final_message),
        media=tuple(media),
    )


def _sampling(generation: GenerationRequest, prompt: TokenizedPrompt) -> dict[str, Any]:
    """Returns the worker's parameters: the client's, else the model's defaults, and all stop token ids."""
    stop = generation.stop
    params = {
        **asdict(generation.sampling.or_else(prompt.defaults)),
        "max_tokens": stop.max_tokens or prompt.default_max_tokens,
        "min_tokens": stop.min_tokens or None,
        "stop": list(stop.strings),
        "ignore_eos": stop.ignore_eos or None,
        "n": generation.choices,
    }
    stop_ids = dict.fromkeys((*stop.token_ids, *unpack_u32(prompt.stop_token_ids), *unpack_u32(prompt.eos_token_ids)))
    non_default = {key: value for key, value in params.items() if value not in (None, [], {}, ())}
    return {**non_default, "stop_token_ids": list(stop_ids)}
