"""Ids of calls as Anthropic's API accepts them.

Models may write ids of their own, such as Kimi's `functions.look:0`, and number the calls of each answer anew. In
requests such an id is only a name that the result repeats: templates that print ids get the model's own form back from
the name and the index of the call.
"""

from __future__ import annotations

import re
from hashlib import blake2b

_PREFIX = "toolu_"
_DIGEST_BYTES = 12
_IS_VALID = re.compile(r"[a-zA-Z0-9_-]{1,128}").fullmatch


def tool_use_id(call_id: str, message_id: str) -> str:
    """Returns a call's id if clients accept it, else one that only this call of this message has."""
    if _IS_VALID(call_id):
        return call_id
    return (
        _PREFIX
        + blake2b(f"{message_id}\0{call_id}".encode(errors="surrogatepass"), digest_size=_DIGEST_BYTES).hexdigest()
    )
