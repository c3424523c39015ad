"""docs/settings.md lists every flag and variable, and is fresh."""

from __future__ import annotations

import pytest
import typer

from sluice import settings
from sluice.cli.commands import app


def test_page_is_what_the_code_declares() -> None:
    assert settings.PAGE.read_text() == settings.page(), "run `python -m sluice.settings --write`"


@pytest.mark.parametrize("service", settings.SERVICES)
def test_page_has_every_setting_of_a_service_with_its_variable(service: str) -> None:
    page = settings.page()
    for name, field in settings.SERVICES[service].model_fields.items():
        if not field.description:
            continue  # not a flag
        flag = f"`--{name.replace('_', '-')}`"
        variables = (f"`SLUICE_{service.upper()}_{name.upper()}`", f"`SLUICE_SERVICE_{name.upper()}`")
        assert any(f"| {flag} | {variable} |" in page for variable in variables), name


def test_fields_without_a_description_are_no_flags() -> None:
    for kind in settings.SERVICES.values():
        assert {name for name, field in kind.model_fields.items() if not field.description} <= {"engine_flags"}


def test_page_has_every_command_and_its_flags() -> None:
    listed = settings.commands()
    assert "sluice keys create" in listed
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        inner = getattr(command, "commands", None) or {"": command}
        for word, one in inner.items():
            _, flags = listed[f"sluice {name} {word}".strip()]
            shown = {flag for setting in flags for flag in setting.flag.split(", ")}
            assert {flag for param in one.params for flag in param.opts if flag.startswith("--")} - {"--help"} <= shown


def test_bounds_choices_and_defaults_are_shown() -> None:
    page = settings.page()
    assert "| `--trace-sample` | `SLUICE_SERVICE_TRACE_SAMPLE` | `0` |" in page
    assert "at least 0, at most 1" in page
    assert "one of `kv`, `round_robin`" in page
    assert "| `--open-health` | `SLUICE_SERVICE_OPEN_HEALTH` | `on` |" in page


def test_secrets_have_no_default_on_the_page() -> None:
    assert "**********" not in settings.page()
