"""The flags of `sluice up` that are the gateway's own: what of a request's way runs where."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path

from services.gateway.pipeline.config import PipelineConfig, parse_stages, resolve


@dataclass(frozen=True)
class PipelineFlags:
    """As the gateway has them; None and empty leave it to the gateway."""

    preset: str | None = None
    pipeline_config: Path | None = None
    preprocessing: str | None = None
    postprocessing: str | None = None
    routing: str | None = None
    direct_route: bool = False
    migration: bool | None = None
    disaggregation: str | None = None
    disagg_min_tokens: int | None = None
    stage: Sequence[str] = ()
    handler: str | None = None

    def config(self) -> PipelineConfig:
        """What they come to; ValueError with a sentence when they cannot be."""
        given = {one.name: getattr(self, one.name) for one in fields(self)}
        file = given.pop("pipeline_config")
        stages = parse_stages(list(given.pop("stage")))
        return resolve({**given, "stages": stages}, file)

    def check_classes(self) -> None:
        """Imports the classes of stages and handler as the gateway will; ValueError with a sentence for a wrong one.

        The gateway is the last process to start: it would refuse them when everything else runs.
        """
        config = self.config()
        named = {**config.stages, **({"handler": config.handler} if config.handler else {})}
        if not named:
            return
        from services.gateway.pipeline.plugins import load  # imports the gateway's stages, which no other command needs

        with _working_directory_importable():
            for stage, path in named.items():
                load(stage, path)

    def gateway_arguments(self) -> tuple[str, ...]:
        """The same flags for the gateway."""
        arguments: list[str] = []
        for one in fields(self):
            value, flag = getattr(self, one.name), one.name.replace("_", "-")
            if one.name == "direct_route":
                arguments += ("--direct-route",) if value else ()
            elif isinstance(value, bool):
                arguments.append(f"--{flag}" if value else f"--no-{flag}")
            elif one.name == "stage":
                for stage in value:
                    arguments += ("--stage", stage)
            elif value is not None:
                arguments += (f"--{flag}", str(value))
        return tuple(arguments)


@contextmanager
def _working_directory_importable() -> Iterator[None]:
    """Puts the user's folder at the end of the path, where the services have it as well."""
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
    """What workers must be told so that they do what the gateway leaves to them."""
    if config.postprocessing == "engine":
        return ("--processing", "full")
    return ("--processing", "prompts") if config.preprocessing == "engine" else ()


def router_arguments(config: PipelineConfig) -> tuple[str, ...]:
    """The router knows what is cached where, so it passes over pairs for short rests of long prompts as well."""
    least = config.disagg_min_tokens
    return ("--bypass-uncached-tokens", str(least - 1)) if least > 1 else ()
