"""The processing flags of `sluice up`: which code tokenizes prompts and parses output."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from typing import ClassVar

from pydantic_settings import BaseSettings

from services.common.discovery.processing_settings import NATIVE_CODE, NO_TRTLLM, ProcessingSettings
from services.common.packages.model_files import ModelSpec, detect_processor, is_hub_id, resolve
from sluice.cli.flags import arguments, flag

FLAGS = ("vllm_processing", "sglang_processing", "trtllm_processing", "native_framework_processing")


@dataclass(frozen=True)
class ProcessingFlags:
    """Selects the code used before and after the engine; at most one of the first four may be set.

    Attributes:
        native_parsers: with one of them, whether the engine's own parsers parse the output as well.
        vllm_python: interpreter that has vllm, also for its workers; empty for the suite's own.
        sglang_python: interpreter that has sglang, also for its workers; empty for the suite's own.
    """

    SETTINGS: ClassVar[type[BaseSettings]] = ProcessingSettings

    vllm_processing: bool = False
    sglang_processing: bool = False
    trtllm_processing: bool = False
    native_framework_processing: bool = False
    native_parsers: bool = flag(
        True,
        "whether these --…-processing flags apply to output as well as to prompts",
        "--native-parsers/--no-native-parsers",
    )
    vllm_python: str = ""
    sglang_python: str = ""

    def problem(self) -> str:
        """Returns what is wrong with the flags, in one sentence; empty if they are valid."""
        if self.trtllm_processing:
            return f"--trtllm-processing: {NO_TRTLLM}."
        if sum(getattr(self, name) for name in FLAGS) > 1:
            flags = [f"--{name.replace('_', '-')}" for name in FLAGS if not name.startswith("trtllm")]
            return f"Of {', '.join(flags[:-1])} and {flags[-1]} only one can be set."
        for engine, python in (("vllm", self.vllm_python), ("sglang", self.sglang_python)):
            if python and shutil.which(python) is None:
                return f"--{engine}-python {python} is not a program; name the Python interpreter that has {engine}."
        if not self.native_parsers and not self._flag:
            return "--no-native-parsers needs --vllm-processing, --sglang-processing or --native-framework-processing."
        return ""

    def note(self, engine: str) -> str:
        """Returns a note for the operator about the choice, in one sentence; empty if there is none."""
        if not self.native_framework_processing or engine in NATIVE_CODE:
            return ""
        return (
            f"--native-framework-processing: the engine {engine} has no code for prompts and output, so Sluice's own "
            f"is used; {' and '.join(sorted(set(NATIVE_CODE.values())))} have theirs"
        )

    def served(self, model: ModelSpec, engine: str) -> ModelSpec:
        """Returns the model as preprocess and postprocess load it at startup, before its worker's card arrives."""
        if not self.native_framework_processing or model.processor:
            return model
        native = NATIVE_CODE.get(engine, "")
        if not native and not is_hub_id(model.source):
            native = detect_processor(resolve(model.source))
        return replace(model, processor=native)

    def python_of(self, engine: str) -> str:
        """Returns the interpreter of an engine's workers; empty for the suite's own."""
        return {"vllm": self.vllm_python, "sglang": self.sglang_python}.get(engine, "")

    def preprocess_arguments(self) -> tuple[str, ...]:
        """Returns the arguments of preprocess."""
        return (*self._flag, *self._pythons)

    def postprocess_arguments(self) -> tuple[str, ...]:
        """Returns the arguments of postprocess."""
        return (*(self._flag if self.native_parsers else ()), *self._pythons)

    @property
    def _flag(self) -> tuple[str, ...]:
        return arguments(**{name: getattr(self, name) or None for name in FLAGS})

    @property
    def _pythons(self) -> tuple[str, ...]:
        return arguments(vllm_python=self.vllm_python or None, sglang_python=self.sglang_python or None)
