"""The front door for the request bodies of strangers that reach a router process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from services.common.base.budgets import Budget, BudgetPool
from services.common.base.errors import ErrorKind, SluiceError, invalid
from services.common.net.intake.json_intake import MAX_VALUES, JsonIntake
from services.common.net.intake.json_size import parsed_size
from services.common.net.intake.json_values import Marks
from services.common.net.intake.pace import LARGE_BYTES, BodyPace
from services.router.scheduling.request_bodies import PARAM, ReadBody, read_body

MAX_WAITING = 64
"""Large bodies that wait to be parsed, at all entrances of a router; further ones are refused, budget `body_time`."""
TURN_S = 10.0
MAX_OPENAI_BODIES = 64 << 20
"""Bytes of all OpenAI bodies of queries together, including parsed ones; more are OVERLOADED, budget `body_bytes`."""
HELD_FACTOR = 3
"""Memory of a prompt until it is tokenized, as a multiple of its length: itself, and the request made of it twice."""

T = TypeVar("T")


def shared_pace() -> BodyPace:
    """Returns the turns of large bodies, for all entrances of a process."""
    return BodyPace(max_waiting=MAX_WAITING)


class BodyIntake:
    """Parses the bodies that arrive at one entrance of the router.

    Args:
        memory: bytes of all bodies of the entrance together, including what is made of them.
        pace: turns of large bodies, shared by the entrances of the process; None: its own.
        subject: what is parsed, as the subject of a sentence; in errors.
        param: the request field at fault; in errors.
    """

    def __init__(
        self,
        memory: BudgetPool,
        pace: BodyPace | None = None,
        subject: str = "The request body",
        param: str = "",
    ) -> None:
        self._memory = memory
        self._intake = JsonIntake(
            Budget("body_values", MAX_VALUES, ""), pace or shared_pace(), subject=subject, param=param
        )
        self._subject = subject
        self._param = param

    async def parse(self, text: bytes) -> tuple[dict[str, Any], int]:
        """Returns a body as a JSON object, and the bytes of memory that are held for it.

        Drop every reference to the object before waiting for anything else, and give the memory back.

        Raises:
            SluiceError: INVALID_ARGUMENT for anything but a JSON object within the budgets, TOO_LARGE for one that
                exceeds the memory, OVERLOADED while others hold it, UNAVAILABLE if too many bodies wait.
        """
        held = 0

        def hold(text: bytes, marks: Marks) -> None:
            nonlocal held
            size = parsed_size(text, marks)
            if size + len(text) > self._memory.limit:  # the text is held by its entrance
                raise self._too_large(size + len(text))
            self.take(size)
            held = size

        try:
            if len(text) <= LARGE_BYTES:  # these exist one at a time, because nothing waits while they do
                parsed = self._intake.parse_now(text)
            else:
                parsed = await self._intake.parse(text, TURN_S, hold)
            if not isinstance(parsed, dict):
                raise invalid(f"{self._subject} is not a JSON object.", param=self._param)
            return parsed, held
        except BaseException:
            self.give_back(held)
            raise

    def give_back(self, held: int) -> None:
        """Gives back memory that is held by `parse` or `take`."""
        self._memory.give_back(held)

    @contextmanager
    def holding(self, size: int) -> Iterator[None]:
        """Holds `size` bytes of the memory during the context, for what is made of a body; raises as `parse`."""
        self.take(size)
        try:
            yield
        finally:
            self.give_back(size)

    async def read(self, text: bytes) -> ReadBody:
        """Returns the prompt of an OpenAI body; raises SluiceError as `parse` and `read_body`."""
        document, held = await self.parse(text)
        try:
            return await beside(len(text), read_body, document)
        finally:
            self.give_back(held)

    def _too_large(self, size: int) -> SluiceError:
        return self._memory.refuse(
            f"{self._subject} takes {size} bytes with all that is made of it, more than the limit of "
            f"{self._memory.limit}; send fewer values in one request",
            param=self._param,
            kind=ErrorKind.TOO_LARGE,
            code="request_too_large",
        )

    def take(self, size: int) -> None:
        """Takes memory for what is made of a body, to be given back; raises as `parse`."""
        if size > self._memory.limit:
            raise self._too_large(size)
        if not self._memory.try_grow(size):
            raise self._memory.refuse(
                "The memory for request bodies is full; retry later",
                kind=ErrorKind.OVERLOADED,
                code="overloaded",
                retry_after_ms=1000,
            )


def openai_bodies(pace: BodyPace | None = None) -> BodyIntake:
    """Returns the entrance of `RouteQuery.openai_body`."""
    return BodyIntake(BudgetPool("body_bytes", MAX_OPENAI_BODIES, ""), pace, "The openai_body", PARAM)


async def beside(size: int, work: Callable[..., T], *args: Any) -> T:
    """Returns what work on a body returns; that on one of more than LARGE_BYTES runs in a thread.

    Args:
        size: length of the body, bytes.
    """
    return work(*args) if size <= LARGE_BYTES else await asyncio.to_thread(work, *args)
