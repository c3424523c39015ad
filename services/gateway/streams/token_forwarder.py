"""The token path: worker batches → the postprocess sessions of their streams.

One slot number names a stream on its worker's session and on its postprocess session alike, so a batch of token
columns is passed on as it came. A batch costs a few microseconds and one append a row: every stream keeps its tokens,
so that another worker or another postprocess replica can go on with it. Rows of slots that the link does not carry,
such as those of another worker's streams, are dropped.
"""

from __future__ import annotations

from array import array

from services.common.packing import pack_u32, unpack_u32
from services.gateway.clients.postprocess_link import PostLink
from services.gateway.clients.worker_link import WorkerLink
from services.gateway.streams.postprocess_pool import PostprocessPool
from services.gateway.streams.stream import GenerationStream

_ONES = pack_u32([1]) * 16_384


class TokenForwarder:
    """Keeps tokens with their streams and passes their columns on.

    Args:
        texts: where text is made.
    """

    def __init__(self, texts: PostprocessPool) -> None:
        self._texts = texts

    def pass_on(self, link: WorkerLink, slots: bytes, counts: bytes, token_ids: bytes) -> None:
        """Takes a batch's columns: slots, tokens of each, and their ids one after the other.

        Raises:
            ValueError: the columns do not fit together.
        """
        sole = self._texts.sole
        if sole is None:
            self._split(link, slots, counts, token_ids)
            return
        if counts != _ONES[: len(counts)]:
            if _extended(link, slots, counts, token_ids):
                sole.feed(slots, counts, token_ids)
            else:
                self._split(link, slots, counts, token_ids)
            return
        ids, foreign = unpack_u32(token_ids), False
        for keep, token in zip(map(link.keep.get, unpack_u32(slots)), ids, strict=True):
            if keep is not None:
                keep(token)
            else:
                foreign = True
        if foreign:  # of streams that have ended, or that another worker computes
            own = [(slot, token) for slot, token in zip(unpack_u32(slots), ids, strict=True) if slot in link.keep]
            if not own:
                return
            slots, token_ids = (pack_u32(column) for column in zip(*own, strict=True))
            counts = _ONES[: len(slots)]
        sole.feed(slots, counts, token_ids)

    def _split(self, link: WorkerLink, slots: bytes, counts: bytes, token_ids: bytes) -> None:
        """The same when streams are on several replicas or wait for one, and for columns with rows to drop or to cut.

        Of what is over a stream's limit one token is passed on, at which its text ends.
        """
        find, ids, start = link.streams.get, unpack_u32(token_ids), 0
        parts: dict[PostLink, tuple[array[int], array[int], array[int]]] = {}
        for slot, number in zip(unpack_u32(slots), unpack_u32(counts), strict=True):
            stream = find(slot)
            if stream is not None:
                room = max(stream.max_tokens + 1 - len(stream.tokens), 0)
                piece = ids[start : start + min(number, room)]
                stream.tokens.extend(piece)
                if stream.post is not None and piece:
                    part = parts.get(stream.post)
                    if part is None:
                        part = parts[stream.post] = (array("I"), array("I"), array("I"))
                    part[0].append(slot)
                    part[1].append(len(piece))
                    part[2].extend(piece)
            start += number
        _check_ends(start, ids)
        for post, columns in parts.items():
            post.feed(*map(pack_u32, columns))


def _extended(link: WorkerLink, slots: bytes, counts: bytes, token_ids: bytes) -> bool:
    """Keeps the tokens of rows of several; False, and nothing is kept, where rows have to be dropped or cut."""
    ids, numbers = unpack_u32(token_ids), unpack_u32(counts)
    streams: list[GenerationStream] = []
    for stream, number in zip(map(link.streams.get, unpack_u32(slots)), numbers, strict=True):
        if stream is None or number > stream.max_tokens + 1 - len(stream.tokens):
            return False
        streams.append(stream)
    _check_ends(sum(numbers), ids)
    start = 0
    for stream, number in zip(streams, numbers, strict=True):
        stream.tokens.extend(ids[start : start + number])
        start += number
    return True


def _check_ends(counted: int, ids: array[int]) -> None:
    """Raises ValueError before columns that do not fit together are passed on."""
    if counted != len(ids):
        raise ValueError(f"The columns count {counted} tokens and have {len(ids)}.")
