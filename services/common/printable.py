"""Text of others that is logged, shown in errors or used as a name: printable, and not longer than it should be."""

from __future__ import annotations

from services.common.errors import invalid

LONGEST_NAME = 256
"""Characters of a name that a peer chooses: of a worker, model, adapter, capability or owner."""
LONGEST_ADDRESS = 300


def escaped(text: str) -> str:
    """Returns text on one line: everything that is not printable is written as an escape sequence, such as ``\\n``."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode("ascii") for one in text)


def sentence(text: str, most: int) -> str:
    """Returns text for an error message: white space becomes one space, the rest is escaped, and it is cut at `most`
    characters."""
    if len(text) <= most and text.isprintable():
        return text
    shown = escaped(" ".join(text[: 4 * most].split()))
    return shown if len(shown) <= most else f"{shown[: most - 1]}…"


def check_name(name: str, param: str, most: int = LONGEST_NAME) -> None:
    """Checks a name that a peer chose.

    Args:
        param: the field that holds it.

    Raises:
        SluiceError: INVALID_ARGUMENT when it is longer than `most` characters or has any that is not printable.
    """
    if len(name) > most:
        raise invalid(f"{param} has {len(name)} characters; the most is {most}.", param=param)
    if not name.isprintable():
        raise invalid(f"{param} must be printable: no line breaks or other control characters.", param=param)
