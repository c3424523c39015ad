"""Forwards token batches of workers to the postprocess sessions of their streams.

A stream has the same slot number on its worker's session and on its postprocess session, so a batch of token columns
can be forwarded unchanged. A batch costs a few microseconds plus one append per row: every stream stores its tokens, so
that another worker or postprocess replica can continue it. Rows of slots that the link does not carry, such as those of
another worker's streams, are dropped.
"""

from __future__ import annotations

from array import array

from services.common.base.packing import pack_u32, unpack_u32
from services.gateway.backends.rpc.worker_link import WorkerLink
from services.gateway.streams.postprocess_pool import PostprocessPool
from services.gateway.streams.stream import GenerationStream, TextLink

_ONES = pack_u32([1]) * 16_384


class TokenForwarder:
    """Stores tokens in their streams and forwards their columns.

    Args:
        texts: the postprocess replicas.
    """

    def __init__(self, texts: PostprocessPool) -> None:
        self._texts = texts

    def forward(self, link: WorkerLink, slots: bytes, counts: bytes, token_ids: bytes) -> None:
        """Forwards a batch: slots, number of tokens of each, and concatenated token ids, each packed u32.

        Raises:
            ValueError: the columns are inconsistent.
        """
        replica = self._texts.single_replica
        if replica is None:
            self._split(link, slots, counts, token_ids)
            return
        if counts != _ONES[: len(counts)]:
            if _extend(link, slots, counts, token_ids):
                replica.feed(slots, counts, token_ids)
            else:
                self._split(link, slots, counts, token_ids)
            return
        ids, has_other_slots = unpack_u32(token_ids), False
        for append, token in zip(map(link.keep.get, unpack_u32(slots)), ids, strict=True):
            if append is not None:
                append(token)
            else:
                has_other_slots = True
        if has_other_slots:  # streams that have ended, or that run on another worker
            rows = [(slot, token) for slot, token in zip(unpack_u32(slots), ids, strict=True) if slot in link.keep]
            if not rows:
                return
            slots, token_ids = (pack_u32(column) for column in zip(*rows, strict=True))
            counts = _ONES[: len(slots)]
        replica.feed(slots, counts, token_ids)

    def _split(self, link: WorkerLink, slots: bytes, counts: bytes, token_ids: bytes) -> None:
        """Forwards row by row, for streams on several replicas or none, and for rows to drop or truncate.

        Of the tokens beyond a stream's limit one is forwarded; there postprocess ends the text.
        """
        find, ids, start = link.streams.get, unpack_u32(token_ids), 0
        columns_by_post: dict[TextLink, tuple[array[int], array[int], array[int]]] = {}
        for slot, number in zip(unpack_u32(slots), unpack_u32(counts), strict=True):
            stream = find(slot)
            if stream is not None:
                room = max(stream.max_tokens + 1 - len(stream.tokens), 0)
                piece = ids[start : start + min(number, room)]
                stream.tokens.extend(piece)
                if stream.post is not None and piece:
                    columns = columns_by_post.get(stream.post)
                    if columns is None:
                        columns = columns_by_post[stream.post] = (array("I"), array("I"), array("I"))
                    columns[0].append(slot)
                    columns[1].append(len(piece))
                    columns[2].extend(piece)
            start += number
        _check_counts(start, ids)
        for post, columns in columns_by_post.items():
            post.feed(*map(pack_u32, columns))


def _extend(link: WorkerLink, slots: bytes, counts: bytes, token_ids: bytes) -> bool:
    """Stores rows of several tokens; returns False without storing any if a row must be dropped or truncated."""
    ids, numbers = unpack_u32(token_ids), unpack_u32(counts)
    streams: list[GenerationStream] = []
    for stream, number in zip(map(link.streams.get, unpack_u32(slots)), numbers, strict=True):
        if stream is None or number > stream.max_tokens + 1 - len(stream.tokens):
            return False
        streams.append(stream)
    _check_counts(sum(numbers), ids)
    start = 0
    for stream, number in zip(streams, numbers, strict=True):
        stream.tokens.extend(ids[start : start + number])
        start += number
    return True


def _check_counts(counted: int, ids: array[int]) -> None:
    """Raises ValueError if the counts do not match the number of token ids."""
    if counted != len(ids):
        raise ValueError(f"The counts sum to {counted} tokens, but the batch has {len(ids)}.")
