"""Flags of commands, made from dataclasses and from the settings that these repeat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
import typer
from pydantic import Field
from pydantic_settings import BaseSettings

from services.common.settings.service import CommaList
from sluice.cli.flags import arguments, flag, made, with_flags


class Settings(BaseSettings):
    level: Literal["low", "high"] = Field("low", description="how loud")
    tokens: int | None = Field(None, ge=1, description="how many")
    file: Path | None = Field(None, description="where")
    stage: CommaList = Field([], description="NAME=CLASS")
    quiet: bool = Field(False, description="no sound")


@dataclass(frozen=True)
class Inner:
    SETTINGS: ClassVar[type[BaseSettings]] = Settings

    stage: Sequence[str] = ()
    quiet: bool = False
    file: Path | None = None


@dataclass(frozen=True)
class Outer:
    SETTINGS: ClassVar[type[BaseSettings]] = Settings

    name: str = flag(MISSING, "whose")
    level: str | None = None
    tokens: int | None = None
    inner: Inner = field(default_factory=Inner)


def run(*words: str) -> tuple[Outer, dict[str, Any]]:
    """Returns the flags of a command line, and the help text of each."""
    given: list[Outer] = []
    app = typer.Typer(add_completion=False)

    @app.command()
    @with_flags(Outer)
    def command(**flags: Any) -> None:
        given.append(made(Outer, flags))

    app(list(words), standalone_mode=False)
    return given[0], {one.name: one.help for one in typer.main.get_command(app).params if one.name != "help"}  # type: ignore[attr-defined]


def test_flags_without_a_value_are_the_dataclass_defaults() -> None:
    assert run("--name", "n")[0] == Outer("n")


def test_flags_of_nested_groups_are_read_with_the_types_of_their_settings() -> None:
    flags, _ = run("--name", "n", "--level", "high", "--tokens", "3", "--stage", "a", "--stage", "b", "--quiet")
    assert flags == Outer("n", "high", 3, Inner(("a", "b"), True))
    assert run("--name", "n", "--file", "x.toml")[0].inner.file == Path("x.toml")


def test_repeated_setting_has_its_description_as_help() -> None:
    assert run("--name", "n")[1] == {
        "name": "whose",
        "level": "how loud",
        "tokens": "how many",
        "stage": "NAME=CLASS; may be repeated",
        "quiet": "no sound",
        "file": "where",
    }


@pytest.mark.parametrize("words", [("--level", "deafening"), ("--tokens", "0"), ("--no-quiet",), ()])
def test_value_that_the_setting_refuses_is_refused(words: tuple[str, ...]) -> None:
    with pytest.raises(typer.BadParameter.__mro__[2]):
        run(*(("--name", "n", *words) if words else ()))


def test_arguments_leave_out_what_is_unset() -> None:
    assert arguments(a_b=None, speed=2.5, on=True, off=False, stage=("x", "y"), none=()) == (
        *("--speed", "2.5", "--on", "--no-off", "--stage", "x", "--stage", "y"),
    )
