"""The token path: worker batches → the postprocess sessions of their streams.

One slot number names a stream on its worker's session and on its postprocess session alike, so a batch of token
columns is passed on as it came. A batch costs a few microseconds and one append a row: every stream keeps its tokens,
so that another worker or another postprocess replica can go on with it.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping

from services.common.packing import pack_u32, unpack_u32
from services.gateway.clients.post_link import PostLink
from services.gateway.live_stream import LiveStream
from services.gateway.text_replicas import TextReplicas

_ONES = pack_u32([1]) * 16_384


class TokenPath:
    """Keeps tokens with their streams and passes their columns on.

    Args:
        streams: every generation under way, by slot; its owner keeps `enter` and `leave` in step with it.
        texts: where text is made.

    Attributes:
        text_here: False when all text is made by the workers.
    """

    def __init__(self, streams: Mapping[int, LiveStream], texts: TextReplicas) -> None:
        self._streams = streams
        self._texts = texts
        self._keep: dict[int, Callable[[int], None]] = {}  # each stream's tokens.append: most rows are one token
        self.text_here = True

    def enter(self, stream: LiveStream) -> None:
        """Its tokens come from now on."""
        self._keep[stream.slot] = stream.tokens.append

    def leave(self, stream: LiveStream) -> None:
        """What still comes of its tokens is dropped."""
        del self._keep[stream.slot]

    def pass_on(self, slots: bytes, counts: bytes, token_ids: bytes) -> None:
        """Takes a batch's columns: slots, tokens of each, and their ids one after the other.

        Raises:
            ValueError: the columns do not fit together.
        """
        sole = self._texts.sole if self.text_here else None
        if sole is None:
            self._split(slots, counts, token_ids)
            return
        ids = unpack_u32(token_ids)
        if counts == _ONES[: len(counts)]:
            for keep, token in zip(map(self._keep.get, unpack_u32(slots)), ids, strict=True):
                if keep is not None:
                    keep(token)
        else:
            find, start = self._streams.get, 0
            for slot, number in zip(unpack_u32(slots), unpack_u32(counts), strict=True):
                stream = find(slot)
                if stream is not None:
                    stream.tokens.extend(ids[start : start + number])
                start += number
            _check_ends(start, ids)
        sole.feed(slots, counts, token_ids)

    def _split(self, slots: bytes, counts: bytes, token_ids: bytes) -> None:
        """The same when streams are on several replicas, or wait for one."""
        find, ids, start = self._streams.get, unpack_u32(token_ids), 0
        parts: dict[PostLink, tuple[array[int], array[int], array[int]]] = {}
        for slot, number in zip(unpack_u32(slots), unpack_u32(counts), strict=True):
            stream = find(slot)
            if stream is not None:
                piece = ids[start : start + number]
                stream.tokens.extend(piece)
                if stream.post is not None:
                    part = parts.get(stream.post)
                    if part is None:
                        part = parts[stream.post] = (array("I"), array("I"), array("I"))
                    part[0].append(slot)
                    part[1].append(number)
                    part[2].extend(piece)
            start += number
        _check_ends(start, ids)
        for link, columns in parts.items():
            link.feed(*map(pack_u32, columns))


def _check_ends(counted: int, ids: array[int]) -> None:
    """ValueError before others hear of columns that do not fit together."""
    if counted != len(ids):
        raise ValueError(f"The columns count {counted} tokens and have {len(ids)}.")
