"""Checks worker registrations: names must be printable and short, and the address connectable."""

from __future__ import annotations

from itertools import chain

from services.common.errors import LONGEST_ADDRESS, LONGEST_NAME, check_name, invalid
from services.common.net.addresses import is_reachable
from sluice.v1 import common_pb2

LONGEST_TEXT = 8_192
"""Maximum characters of the card's strings that are not names, such as the tokenizer's source."""
MOST_NAMES = 1_024
"""Maximum number of adapters, of capabilities, and of labels on one card."""


def check_worker(worker_id: str, address: str, card: common_pb2.ModelCard) -> None:
    """Checks the names a worker registers with.

    Raises:
        SluiceError: INVALID_ARGUMENT, naming the field at fault, for a name that is too long or not printable, for too
            many names, and for an address that is not host:port.
    """
    check_name(worker_id, "worker_id")
    check_name(address, "address", LONGEST_ADDRESS)
    if not is_reachable(address):
        raise invalid(f"address {address!r} is not host:port.", param="address")
    for name, entries in (("adapters", card.adapters), ("capabilities", card.capabilities), ("labels", card.labels)):
        if len(entries) > MOST_NAMES:
            raise invalid(f"card.{name} has {len(entries)} entries; send at most {MOST_NAMES}.", param=f"card.{name}")
        for entry in entries:
            check_name(entry, f"card.{name}")
    tokenizer = card.tokenizer
    names = {"model": card.model, "tool_parser": card.tool_parser, "reasoning_parser": card.reasoning_parser}
    texts = {
        "tokenizer.processor": tokenizer.processor,
        "tokenizer.source": tokenizer.source,
        "tokenizer.fingerprint": tokenizer.fingerprint,
        "tokenizer.prompt_fingerprint": tokenizer.prompt_fingerprint,
        "tokenizer.media_fingerprint": tokenizer.media_fingerprint,
    }
    for name, text in chain(names.items(), texts.items()):
        check_name(text, f"card.{name}", LONGEST_NAME if name in names else LONGEST_TEXT)
