"""Compares the fingerprints of tokenizers."""

from __future__ import annotations

from typing import Protocol

from services.common.types.media.spans import SAMPLES


class Fingerprints(Protocol):
    """Fingerprints of a tokenizer: of its files, and of the ids that it gives to fixed chats; empty if unknown."""

    @property
    def fingerprint(self) -> str: ...

    @property
    def prompt_fingerprint(self) -> str: ...


def agreement(ours: str, theirs: str) -> bool | None:
    """Whether two fingerprints of fixed chats agree where both sides accept the chat; None if that is unknown."""
    pairs = zip(ours.split(","), theirs.split(","), strict=False) if ours and theirs else ()
    comparable = [one == other for one, other in pairs if "-" not in (one, other)]
    return all(comparable) if comparable else None


def same_tokenizer(ours: Fingerprints, theirs: Fingerprints) -> bool | None:
    """Whether two tokenizers agree on fixed chats or, if that is unknown, have the same files; None if unknown too."""
    agree = agreement(ours.prompt_fingerprint, theirs.prompt_fingerprint)
    if agree is not None:
        return agree
    if not ours.fingerprint or not theirs.fingerprint:
        return None
    return ours.fingerprint == theirs.fingerprint


def differing_kinds(ours: str, theirs: str) -> frozenset[str]:
    """Returns the kinds of media items for which two media fingerprints do not agree."""
    found, start = set(), 0
    sides = [fingerprint.split(",") if fingerprint else [] for fingerprint in (ours, theirs)]
    for kind, samples in SAMPLES.items():
        one, other = (",".join(side[start : start + samples]) for side in sides)
        if agreement(one, other) is False:
            found.add(kind.capability)
        start += samples
    return frozenset(found)
