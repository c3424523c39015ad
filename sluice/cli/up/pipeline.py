"""The flags of `sluice up` that configure the gateway's pipeline."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, make_dataclass
from pathlib import Path
from typing import Any, ClassVar

from pydantic_settings import BaseSettings

from services.gateway.pipeline.config import PipelineConfig, options
from services.gateway.pipeline.settings import PipelineSettings, configured
from sluice.cli.flags import arguments, flag

_Options = make_dataclass("_Options", [(name, Any, None) for name in options()], frozen=True)


@dataclass(frozen=True)
class PipelineFlags(_Options):  # type: ignore[valid-type, misc]
    """Holds the gateway's flags of the same names; None and empty leave the default to the gateway."""

    SETTINGS: ClassVar[type[BaseSettings]] = PipelineSettings

    preset: str | None = None
    pipeline_config: Path | None = None
    migration: bool | None = flag(
        None,
        PipelineSettings.model_fields["migration"].description or "",
        "--migration/--no-migration",
        "--migration-enabled/--no-migration-enabled",
    )
    direct_route: bool = flag(False, "same as --routing direct", "--direct-route")
    stage: Sequence[str] = ()

    def config(self) -> PipelineConfig:
        """Returns the resulting configuration; raises ValueError with a sentence for invalid flags."""
        return configured(vars(self))

    def check_classes(self) -> None:
        """Imports the classes of stages and handler as the gateway does; raises ValueError for an invalid one.

        The gateway is the last process to start and would reject them only after all others run.
        """
        config = self.config()
        named = {**config.stages, **({"handler": config.handler} if config.handler else {})}
        if not named:
            return
        from services.gateway.pipeline.plugins import load  # slow: imports the gateway's stages

        with _working_directory_importable():
            for stage, path in named.items():
                load(stage, path)

    def gateway_arguments(self) -> tuple[str, ...]:
        """Returns the flags as arguments of the gateway."""
        given = vars(self) | ({"routing": "direct"} if self.direct_route else {})
        return arguments(**{name: value for name, value in given.items() if name != "direct_route"})


@contextmanager
def _working_directory_importable() -> Iterator[None]:
    """Appends the working directory to the import path, as the services do."""
    folder = os.getcwd()
    if folder in sys.path:
        yield
        return
    sys.path.append(folder)
    try:
        yield
    finally:
        sys.path.remove(folder)


def worker_arguments(config: PipelineConfig) -> tuple[str, ...]:
    """Returns the arguments with which workers perform the steps that the gateway leaves to them."""
    if config.postprocessing == "engine":
        return ("--processing", "full")
    return ("--processing", "prompts") if config.preprocessing == "engine" else ()
