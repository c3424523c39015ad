"""Text that every peer can be sent: protobuf and JSON are UTF-8, which has no halves of surrogate pairs.

Text that was decoded from bytes is always sendable. Escape sequences are the one source of other text: `json.loads`
and Python literals turn `\\ud801` into half of a pair. Code that decodes escape sequences returns `sendable` text,
since one such character would make a message with the output of many streams fail.
"""

from __future__ import annotations

import re


def sendable(text: str) -> str:
    """Returns text that can be encoded as UTF-8.

    Halves of a surrogate pair that follow each other become the character that they form, others U+FFFD.
    """
    if text.isascii() or is_sendable(text):
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def is_sendable(text: str) -> bool:
    """Returns whether text can be encoded as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_surrogate(number: int) -> bool:
    """Returns whether a code point is half of a surrogate pair."""
    return 0xD800 <= number <= 0xDFFF


_ESCAPES = re.compile(
    r"(\\\\|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})|\\u[dD][89a-fA-F][0-9a-fA-F]{2}"
)


def sendable_json(text: str) -> str:
    r"""Returns JSON whose strings stay sendable when it is parsed: escape sequences of half a pair become `\ufffd`."""
    return _ESCAPES.sub(lambda escape: escape[1] or r"\ufffd", text) if "\\u" in text else text
