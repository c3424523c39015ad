"""Labels of a worker, as its operator gives them."""

from __future__ import annotations

import pytest

from services.worker.settings import WorkerSettings


def test_labels_given_as_flags_or_lists_become_names_and_values() -> None:
    settings = WorkerSettings.load(["--worker-labels", "zone=eu-1,gpu=h200", "--worker-labels", "path=a=b"])
    assert settings.label_values == {"zone": "eu-1", "gpu": "h200", "path": "a=b"}
    assert WorkerSettings.load([]).label_values == {}


@pytest.mark.parametrize("text", ["zone", "=x", "zone="])
def test_label_without_name_or_value_is_rejected(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        WorkerSettings.load(["--worker-labels", text])
    assert "is not NAME=VALUE" in capsys.readouterr().err
