"""Client of Sluice's router and workers for external schedulers: select, reserve, run, free.

Start with `RouterClient` and `WorkerClient`; `prompts` prepares prompts, `errors` has the exceptions, and `wire` has
every message as a dataclass.
"""

from sluice_client.errors import (
    ConnectionFailedError,
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    PermissionDeniedError,
    RequestCancelledError,
    SluiceError,
    UnauthenticatedError,
    UnavailableError,
)
from sluice_client.hashing import HASH_SCHEME, block_hashes
from sluice_client.options import Tls
from sluice_client.packing import pack_u32, pack_u64, unpack_u32, unpack_u64
from sluice_client.prompts import by_answer, by_hashes, by_length, by_openai_body, by_tokens, hashed_here
from sluice_client.reservation import Reservation
from sluice_client.router import RouterClient
from sluice_client.wire import ErrorKind, FinishReason, SamplingOptions, StopOptions, WorkerChangeKind
from sluice_client.worker import Delta, WorkerClient

__all__ = [
    "HASH_SCHEME",
    "ConnectionFailedError",
    "DeadlineExceededError",
    "Delta",
    "ErrorKind",
    "FailedPreconditionError",
    "FinishReason",
    "InvalidRequestError",
    "NotFoundError",
    "OverloadedError",
    "PermissionDeniedError",
    "RequestCancelledError",
    "Reservation",
    "RouterClient",
    "SamplingOptions",
    "SluiceError",
    "StopOptions",
    "Tls",
    "UnauthenticatedError",
    "UnavailableError",
    "WorkerChangeKind",
    "WorkerClient",
    "block_hashes",
    "by_answer",
    "by_hashes",
    "by_length",
    "by_openai_body",
    "by_tokens",
    "hashed_here",
    "pack_u32",
    "pack_u64",
    "unpack_u32",
    "unpack_u64",
]
