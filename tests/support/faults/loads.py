"""Every load by name."""

from __future__ import annotations

from collections.abc import Mapping

from tests.support.faults.load import Load
from tests.support.faults.load_batches import Batches
from tests.support.faults.load_chats import Images, Messages, Pairs, StreamedChats, ToolCalls, WholeChats
from tests.support.faults.load_responses import BackgroundResponses, SocketResponses, StreamedResponses
from tests.support.faults.load_routes import Picks, Reservations

KINDS: tuple[type[Load], ...] = (
    StreamedChats,
    WholeChats,
    ToolCalls,
    Pairs,
    Images,
    StreamedResponses,
    BackgroundResponses,
    SocketResponses,
    Messages,
    Batches,
    Reservations,
    Picks,
)
LOADS: Mapping[str, type[Load]] = {kind.name: kind for kind in KINDS}
