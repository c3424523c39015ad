"""Engine-specific fields that every API of the gateway accepts, named as in chat completions."""

from __future__ import annotations

from typing import Any

from services.gateway.apis.openai.engine_fields import SharedFields
from services.gateway.apis.openai.fields import JsonObject


class EngineExtensions(SharedFields):
    """Extension fields beyond the API's own, with the same meaning as in chat completions."""

    chat_template_kwargs: JsonObject = None

    def extensions(self) -> dict[str, Any]:
        """Returns the fields that are set, by their chat completion names."""
        return {name: value for name in EngineExtensions.model_fields if (value := getattr(self, name)) is not None}
