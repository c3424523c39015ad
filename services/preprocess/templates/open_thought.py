"""Finds whether a prompt ends inside a thought, which the message that the model continues leaves open.

The end of a prompt shows only short thoughts; the message has it all. But templates drop thoughts of messages, so the
prompt must end with it, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from services.common.base.packing import unpack_u32
from services.common.packages.model_files import open_thought
from services.preprocess.contract.tokenizer import TokenizerProtocol

_COMPARED = 64
"""Last characters of a thought, without white space, that the prompt must end with."""
_BYTES_OF_ID = 4


def ends_in_thought(tokenizer: TokenizerProtocol, packed: bytes, messages: Sequence[Any]) -> bool:
    """Returns whether the last message leaves a thought open, and the prompt, packed u32, ends inside it."""
    thought = open_thought(_text_of(messages[-1])) if messages else ""
    if not thought:
        return False
    ids = unpack_u32(packed[-_BYTES_OF_ID * len(thought.encode(errors="replace")) :])
    prompt = "".join(tokenizer.decode(ids).split())
    tail = "".join(thought.split())
    return open_thought(prompt) != "" and prompt.endswith(tail[-_COMPARED:])


def _text_of(message: Any) -> str:
    content = message.get("content") if isinstance(message, dict) else None
    if isinstance(content, list):
        parts = [part.get("text") for part in content if isinstance(part, dict)]
        return "".join(part for part in parts if isinstance(part, str))
    return content if isinstance(content, str) else ""
