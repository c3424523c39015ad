"""What a chat template shows of a conversation, as learned by rendering probes."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

MAPPING, TEXT, HIDDEN = "mapping", "text", "hidden"
"""The forms of a call's arguments; hidden: the template shows no calls."""
ANY, SHORT, NAMED = "any", "short", "named"
"""The ids of calls: any; nine letters and digits; `functions.NAME:INDEX`, where only ids are shown."""
TOGETHER, BEFORE, AFTER = "together", "before", "after"
"""Where text beside calls is shown: in their turn, in one of its own before them, or only in the answer after them."""
STANDARD_FIELDS = ("reasoning_content", "reasoning")
"""Clients send either name of reasoning; templates read either."""
REASONING_FIELDS = (*STANDARD_FIELDS, "thinking", "thought")


@dataclass(frozen=True, slots=True)
class TemplateCapabilities:
    """What a template shows. The defaults hold where nothing is known: they lose no text with most templates.

    Attributes:
        system: a leading system message.
        system_with_result: a leading system message of a conversation that ends with a tool's result.
        developer: the role developer, other than by printing any role.
        second_system: several leading system messages.
        late_system: system messages after a turn.
        empty_assistant: assistant turns without text.
        repeated_user: consecutive user turns.
        repeated_assistant: consecutive assistant turns.
        user_after_tool: a user turn directly after a tool's result.
        tool_results: the role tool.
        arguments: the form of a call's arguments.
        loose_arguments: arguments that are not a JSON object.
        null_content: calls are shown only if the content beside them is null.
        text_with_calls: where text beside calls is shown.
        past_text_with_calls: text in a turn with calls is still shown after the answer that follows them.
        parallel_calls: several calls in one turn.
        call_ids: the ids of calls.
        reasoning: the fields of reasoning that it reads.
        reasoning_with_text: reasoning, text and calls in one turn.
        tools: definitions of tools.
        tool_description: it cannot do without the description of a tool.
        tool_parameters: it cannot do without the parameters of a tool.
        tool_properties: it cannot do without the properties of a tool's parameters.
        tool_nulls: fields of a tool that are null.
    """

    system: bool = True
    system_with_result: bool = True
    developer: bool = False
    second_system: bool = False
    late_system: bool = False
    empty_assistant: bool = True
    repeated_user: bool = True
    repeated_assistant: bool = True
    user_after_tool: bool = True
    tool_results: bool = True
    arguments: str = MAPPING
    loose_arguments: bool = False
    null_content: bool = False
    text_with_calls: str = TOGETHER
    past_text_with_calls: bool = True
    parallel_calls: bool = True
    call_ids: str = ANY
    reasoning: tuple[str, ...] = ()
    reasoning_with_text: bool = True
    tools: bool = True
    tool_description: bool = False
    tool_parameters: bool = False
    tool_properties: bool = False
    tool_nulls: bool = True

    def as_json(self) -> dict[str, Any]:
        """Returns the JSON form."""
        return asdict(self)

    @classmethod
    def read(cls, form: dict[str, Any]) -> TemplateCapabilities:
        """Returns the capabilities of a JSON form; what it lacks keeps its default."""
        known = {field.name: form[field.name] for field in fields(cls) if field.name in form}
        if "reasoning" in known:
            known["reasoning"] = tuple(known["reasoning"])
        return cls(**known)


UNKNOWN = TemplateCapabilities()
