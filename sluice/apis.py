"""The HTTP APIs that a package may add to the gateway, and what they are written with.

An API is a function of the entry point group `sluice.apis` that takes `ApiParts` and `ApiRoutes` and adds operations:
each takes a parsed body and its caller, and returns a whole or a streamed answer. `examples/api` is one, Ollama's
`/api/chat`; docs/writing-an-api.md explains it.
"""

from services.common.base.errors import ErrorKind, SluiceError, internal, invalid, not_found, overloaded, unavailable
from services.gateway.apis.openai.chat_translation import translate_chat
from services.gateway.apis.openai.fields import Strict
from services.gateway.apis.openai.openapi import GENERATING, responses
from services.gateway.apis.openai.response_schemas import Open
from services.gateway.apis.openai.validation import check
from services.gateway.apis.parts import ApiParts
from services.gateway.apis.routes import ApiRoutes, ModelListFormat
from services.gateway.core.request import Finish, FinishReason
from services.gateway.http.error_formats import ErrorFormat, HttpError
from services.gateway.operations.field_names import FieldNameMap
from services.gateway.operations.logprobs import TokenText
from services.gateway.operations.operation import Answer, Caller, Detached, Operation, Streamed, Whole
from services.gateway.operations.output import Counts
from services.gateway.operations.runner import AnswerRunner, TranslatedRequest
from services.gateway.operations.sinks import CollectedTurn, EventEncoder
from services.gateway.operations.transcript import Block, BlockKind

__all__ = [
    "GENERATING",
    "Answer",
    "AnswerRunner",
    "ApiParts",
    "ApiRoutes",
    "Block",
    "BlockKind",
    "Caller",
    "CollectedTurn",
    "Counts",
    "Detached",
    "ErrorFormat",
    "ErrorKind",
    "EventEncoder",
    "FieldNameMap",
    "Finish",
    "FinishReason",
    "HttpError",
    "ModelListFormat",
    "Open",
    "Operation",
    "SluiceError",
    "Streamed",
    "Strict",
    "TokenText",
    "TranslatedRequest",
    "Whole",
    "check",
    "internal",
    "invalid",
    "not_found",
    "overloaded",
    "responses",
    "translate_chat",
    "unavailable",
]
