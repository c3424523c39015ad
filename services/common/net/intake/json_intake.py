"""Bounds and parses JSON from foreign senders: bytes, values and depth are checked before anything is built."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import orjson

from services.common.base.budgets import Budget
from services.common.base.errors import ErrorKind, SluiceError, invalid
from services.common.net.intake.json_scan import Scan, depth_of
from services.common.net.intake.json_slices import SlicedParser, SliceError
from services.common.net.intake.json_values import Marks, check_values, too_many_values
from services.common.net.intake.pace import LARGE_BYTES, BodyPace

MAX_DEPTH = 200
"""Levels of lists and objects in a body, for the stack of code that walks it; deeper refused, budget `body_depth`."""
SLICED_FROM = 256 << 10
"""Minimum length of texts that are parsed in slices; bytes."""
SLICED_WEIGHT = 50_000
"""Minimum weight of values, as in `check_values`, of texts that are parsed in slices."""

_NO_PACE = BodyPace()
_DEPTH = Budget("body_depth", MAX_DEPTH, "")

MAX_VALUES = 2_000_000
"""Weight of the values of JSON, as in `check_values`, where no setting is given; more refused, budget `body_values`."""
Check = Callable[[bytes, Marks], None]
"""Raises SluiceError for a text whose objects may not be built, by its marks."""


def foreign_json(text: bytes, field: str) -> Any:
    """Returns the parsed JSON of a field of a message, within fixed bounds on values and depth.

    Args:
        field: its name in errors.

    Raises:
        SluiceError: INVALID_ARGUMENT.
    """
    return JsonIntake(Budget("body_values", MAX_VALUES, ""), _NO_PACE, subject=field, param=field).parse_now(text)


async def own_json(text: bytes, pace: BodyPace, timeout_s: float) -> Any:
    """Returns the parsed JSON of a text that the suite itself wrote; a large one is parsed in slices, in its turn.

    Args:
        timeout_s: longest wait for the turn.

    Raises:
        SluiceError: UNAVAILABLE if the turn does not come in time.
    """
    if len(text) < SLICED_FROM:
        return orjson.loads(text)
    parser = SlicedParser(text)
    await pace.turn(timeout_s, parser.slices())
    return parser.value


class JsonIntake:
    """Parses the bodies that arrive at one entrance.

    Args:
        values: maximum weight of values (`check_values`); None for no limit.
        pace: schedules large bodies; shared by the entrances of a process. None: a schedule of its own.
        max_bytes: maximum length; None where the entrance has bounded it while reading.
        subject: what is parsed, as the subject of a sentence; in errors.
        param: the request field at fault; in errors.
    """

    def __init__(
        self,
        values: Budget | None = None,
        pace: BodyPace | None = None,
        *,
        max_bytes: Budget | None = None,
        subject: str = "The request body",
        param: str = "",
    ) -> None:
        self._values = values
        self._pace = pace or BodyPace()
        self._max_bytes = max_bytes
        self._subject = subject
        self._param = param

    async def parse(self, text: bytes, timeout_s: float, check: Check | None = None) -> Any:
        """Returns a parsed text; one longer than LARGE_BYTES waits for its turn, and a large one is parsed in slices.

        Args:
            timeout_s: longest wait for the turn.
            check: further checks, made before objects are built.

        Raises:
            SluiceError: INVALID_ARGUMENT for a text that is not JSON or exceeds a budget, TOO_LARGE, UNAVAILABLE if
                the turn does not come in time; whatever `check` raises.
        """
        self._check_length(text)
        if len(text) <= LARGE_BYTES:
            self._checked(text, check)
            return self._whole(text)
        parsed: list[Any] = []
        await self._pace.turn(timeout_s, self._steps(text, check, parsed))
        return parsed.pop()

    def parse_now(self, text: bytes) -> Any:
        """Returns a parsed text, without a turn: for short texts and threads; raises as `parse`."""
        self._check_length(text)
        self._checked(text, None)
        return self._whole(text)

    def _check_length(self, text: bytes) -> None:
        if self._max_bytes is not None:
            subject = f"{self._subject} has {len(text)} bytes, which"
            self._max_bytes.check(len(text), subject, param=self._param, kind=ErrorKind.TOO_LARGE)

    def _checked(self, text: bytes, check: Check | None) -> None:
        """Checks values and depth of a text, and makes further checks."""
        marks = None if check is None else Marks.of(text)
        if self._values is not None:
            check_values(text, self._values, marks, subject=self._subject, param=self._param)
        opened = text.count(b"[") + text.count(b"{") if marks is None else marks.lists + marks.objects
        if opened > MAX_DEPTH and depth_of(text) > MAX_DEPTH:
            raise self._too_deep()
        if check is not None and marks is not None:
            check(text, marks)

    def _too_deep(self) -> SluiceError:
        reason = f"{self._subject} is nested too deeply; the limit is {MAX_DEPTH} levels"
        return _DEPTH.refuse(reason, param=self._param)

    def _scanned(self, scan: Scan) -> Iterator[None]:
        """Checks values and depth in slices."""
        yield from scan.slices()
        if scan.too_many:
            assert self._values is not None
            raise too_many_values(self._values, self._subject, self._param)
        if scan.too_deep:
            raise self._too_deep()

    def _steps(self, text: bytes, check: Check | None, parsed: list[Any]) -> Iterator[None]:
        """Checks and parses a text in slices, into `parsed`."""
        scan = Scan(text, None if self._values is None else self._values.limit, MAX_DEPTH)
        yield from self._scanned(scan)
        marks = scan.marks
        if check is not None:
            check(text, marks)
        if len(text) < SLICED_FROM and marks.weight < SLICED_WEIGHT:
            parsed.append(self._whole(text))
            return
        yield
        parser = SlicedParser(text)
        try:
            yield from parser.slices()
        except SliceError as error:
            raise self._malformed(f"{error} after byte {error.near}") from None
        parsed.append(parser.value)

    def _whole(self, text: bytes) -> Any:
        try:
            return orjson.loads(text)
        except orjson.JSONDecodeError as error:
            raise self._malformed(f"{error.msg} at character {error.pos}") from None

    def _malformed(self, fault: str) -> SluiceError:
        return invalid(f"{self._subject} is not valid JSON: {fault}.", param=self._param)
