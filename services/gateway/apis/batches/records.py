"""Files and batches as they are stored, and as OpenAI's API shows them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import orjson

Status = Literal["validating", "in_progress", "finalizing", "completed", "cancelling", "cancelled", "expired", "failed"]
OPEN: tuple[Status, ...] = ("validating", "in_progress", "finalizing", "cancelling")
"""Statuses of batches that still have work."""
UPLOAD = "batch"
"""Purpose of uploaded files."""
RESULT = "batch_output"
_TIMES = (
    "in_progress_at",
    "expires_at",
    "finalizing_at",
    "completed_at",
    "failed_at",
    "expired_at",
    "cancelling_at",
    "cancelled_at",
)


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A stored file; times are Unix seconds, `lines` is the number of its line ends, 0 if they were not counted."""

    id: str
    filename: str
    purpose: str
    size: int
    created_at: int
    expires_at: int
    lines: int = 0

    @property
    def is_upload(self) -> bool:
        """Whether a client uploaded it; the others are results."""
        return self.purpose == UPLOAD

    def shown(self) -> dict[str, Any]:
        """Returns OpenAI's file object."""
        fields = asdict(self)
        del fields["lines"]
        return {"object": "file", "bytes": fields.pop("size"), **fields, "status": "processed", "status_details": None}

    def dump(self) -> bytes:
        """Returns the record as JSON."""
        return orjson.dumps(asdict(self))

    @classmethod
    def load(cls, text: bytes) -> FileRecord:
        """Returns the record of `dump`."""
        return cls(**orjson.loads(text))


@dataclass(frozen=True, slots=True)
class BatchRecord:
    """A batch. `times` has Unix seconds by OpenAI's names; `total` is 0 until the lines are counted.

    Attributes:
        owner, key_id: tenant and API key whose permissions and limits apply.
    """

    id: str
    owner: str
    key_id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    status: Status = "validating"
    total: int = 0
    times: dict[str, int] = field(default_factory=dict)
    output_file_id: str | None = None
    error_file_id: str | None = None
    errors: list[dict[str, Any]] = field(default_factory=list)
    metadata: dict[str, str] | None = None

    def shown(self, completed: int, failed: int) -> dict[str, Any]:
        """Returns OpenAI's batch object.

        Args:
            completed, failed: lines that have a result.
        """
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": {"object": "list", "data": self.errors} if self.errors else None,
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": self.status,
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            "created_at": self.created_at,
            **{name: self.times.get(name) for name in _TIMES},
            "request_counts": {"total": self.total, "completed": completed, "failed": failed},
            "metadata": self.metadata,
        }

    def dump(self) -> bytes:
        """Returns the record as JSON."""
        return orjson.dumps(asdict(self))

    @classmethod
    def load(cls, text: bytes) -> BatchRecord:
        """Returns the record of `dump`."""
        return cls(**orjson.loads(text))
