"""Checks worker registrations: names must be printable and short, and the address connectable."""

from __future__ import annotations

from itertools import chain

from services.common.base.errors import MAX_ADDRESS_LENGTH, MAX_NAME_LENGTH, check_name, invalid
from services.common.net.addresses import is_reachable
from sluice.v1 import common_pb2

MAX_TEXT = 8_192
"""Characters of a text of a card, such as the tokenizer's source; a longer one is refused with INVALID_ARGUMENT."""
MAX_CARD_BYTES = 2 << 20
"""Bytes of a card with its chat template, sent to every service; a larger one is refused with INVALID_ARGUMENT."""
MAX_NAMES = 1_024
"""Adapters, capabilities, or labels on a card; a card with more is refused with INVALID_ARGUMENT."""


def check_worker(worker_id: str, address: str, card: common_pb2.ModelCard) -> None:
    """Checks the names a worker registers with.

    Raises:
        SluiceError: INVALID_ARGUMENT, naming the field at fault, for a name that is too long or not printable, for too
            many names, for a card that is too large, and for an address that is not host:port.
    """
    if (size := card.ByteSize()) > MAX_CARD_BYTES:
        raise invalid(f"card has {size} bytes; send at most {MAX_CARD_BYTES}.", param="card")
    check_name(worker_id, "worker_id")
    check_name(address, "address", MAX_ADDRESS_LENGTH)
    if not is_reachable(address):
        raise invalid(f"address {address!r} is not host:port.", param="address")
    for name, entries in (("adapters", card.adapters), ("capabilities", card.capabilities), ("labels", card.labels)):
        if len(entries) > MAX_NAMES:
            raise invalid(f"card.{name} has {len(entries)} entries; send at most {MAX_NAMES}.", param=f"card.{name}")
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
        check_name(text, f"card.{name}", MAX_NAME_LENGTH if name in names else MAX_TEXT)
