"""Conversations as clients write them, generated with hypothesis."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

ENGLISH = "What is the weather in Paris today? def main() -> None:"
AWKWARD = (
    "<|im_end|>",
    "<|im_start|>",
    "<|eot_id|>",
    "</s>",
    "<s>",
    "[INST]",
    "[/INST]",
    "<unk>",
    "  ",
    "\n\n",
    "\t",
    "",
)
OTHERS = ("Grüße", "привет", "你好", "😀🎉", "👨‍👩‍👧", "e\u0301", "ﬁ", "\u200b", "1234567", "￿")

texts = st.lists(
    st.one_of(
        st.sampled_from(ENGLISH.split(" ")),
        st.sampled_from(OTHERS),
        st.sampled_from(AWKWARD),
        st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=6),
    ),
    min_size=1,
    max_size=12,
).map(" ".join)

parts = st.lists(texts.map(lambda text: {"type": "text", "text": text}), min_size=1, max_size=3)

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather in a city, “now”.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
                "required": ["city"],
            },
        },
    },
    {"type": "function", "function": {"name": "now", "description": "", "parameters": {"type": "object"}}},
]


@st.composite
def plain_chats(draw: st.DrawFn, with_parts: bool = True, ends: tuple[str, ...] = ("user",)) -> dict[str, Any]:
    """Turns in the usual order: an optional system message, then user and assistant in turn.

    Args:
        with_parts: some contents are lists of parts.
        ends: roles the last message may have.
    """
    contents = st.one_of(texts, parts) if with_parts else texts
    messages: list[dict[str, Any]] = []
    if draw(st.booleans()):
        messages.append({"role": "system", "content": draw(texts)})
    for _ in range(draw(st.integers(0, 3))):
        messages.append({"role": "user", "content": draw(contents)})
        messages.append({"role": "assistant", "content": draw(texts)})
    if not messages or messages[-1]["role"] != "assistant" or "user" in (end := draw(st.sampled_from(ends))):
        messages.append({"role": "user", "content": draw(contents)})
        end = "user"
    return {"messages": messages} if end == "user" else {"messages": messages, **_continued(draw)}


def _continued(draw: st.DrawFn) -> dict[str, Any]:
    return draw(st.sampled_from(({}, {"continue_final_message": True, "add_generation_prompt": False})))


@st.composite
def tool_chats(draw: st.DrawFn) -> dict[str, Any]:
    """A conversation in which tools may be called, one or two at once, and have answered."""
    chat: dict[str, Any] = draw(plain_chats())
    chat["tools"] = TOOLS[: draw(st.integers(1, 2))]
    for _ in range(draw(st.integers(0, 2))):
        names = draw(st.lists(st.sampled_from(("get_weather", "now")), min_size=1, max_size=2))
        calls = [
            {
                "id": draw(st.text("abcdefgh123456", min_size=9, max_size=9)),
                "type": "function",
                "function": {"name": name, "arguments": '{"city": "München", "days": 2}' if "w" in name[-3:] else "{}"},
            }
            for name in names
        ]
        chat["messages"].append(
            {"role": "assistant", "content": draw(st.sampled_from(("", "Let me see."))), "tool_calls": calls}
        )
        for call in calls:
            answer = {"role": "tool", "tool_call_id": call["id"], "content": draw(texts)}
            chat["messages"].append(answer)
        chat["messages"].append({"role": "assistant", "content": draw(texts)})
        chat["messages"].append({"role": "user", "content": draw(texts)})
    return chat


@st.composite
def chats(draw: st.DrawFn) -> dict[str, Any]:
    """Any of them, with the options that change a prompt."""
    chat: dict[str, Any] = draw(st.one_of(plain_chats(ends=("user", "assistant")), tool_chats()))
    if draw(st.booleans()):
        chat["chat_template_kwargs"] = {"enable_thinking": draw(st.booleans())}
    return chat
