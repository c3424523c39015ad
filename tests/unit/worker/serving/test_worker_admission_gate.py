"""The gate refuses for hours without keeping those that it refused."""

from __future__ import annotations

import traceback

import pytest

from services.common.errors import ErrorKind, SluiceError
from services.worker.serving.admission_gate import AdmissionGate
from services.worker.serving.status import WorkerStatus


def test_who_is_refused_again_and_again_is_not_kept() -> None:
    gate = AdmissionGate(WorkerStatus(), 0)
    refused = SluiceError(ErrorKind.UNAVAILABLE, "The worker sleeps.")
    gate.close(refused)
    for _ in range(50):
        with pytest.raises(SluiceError, match="sleeps"):
            gate.check()
    assert len(list(traceback.walk_tb(refused.__traceback__))) < 5
