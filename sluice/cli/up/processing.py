"""The flags of `sluice up` that choose whose code makes prompts and reads answers, and what services are told."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace

from services.common.discovery.processing_settings import NATIVE_CODE, NO_TRTLLM
from services.common.models import ModelSpec, detect_processor, is_hub_id, resolve

FLAGS = ("vllm_processing", "sglang_processing", "trtllm_processing", "native_framework_processing")


@dataclass(frozen=True)
class ProcessingFlags:
    """Whose code is used before and after the engine; at most one of the first four may be set.

    Attributes:
        native_parsers: with one of them, the engine's own parsers read the answers as well.
        vllm_python: interpreter that has vllm; empty for the suite's own.
        sglang_python: interpreter that has sglang.
    """

    vllm_processing: bool = False
    sglang_processing: bool = False
    trtllm_processing: bool = False
    native_framework_processing: bool = False
    native_parsers: bool = True
    vllm_python: str = ""
    sglang_python: str = ""

    def problem(self) -> str:
        """Why the flags cannot be what they are, in one sentence; empty when they can."""
        if self.trtllm_processing:
            return f"--trtllm-processing: {NO_TRTLLM}."
        if sum(getattr(self, name) for name in FLAGS) > 1:
            flags = [f"--{name.replace('_', '-')}" for name in FLAGS if not name.startswith("trtllm")]
            return f"Of {', '.join(flags[:-1])} and {flags[-1]} only one can be set."
        if not self.native_parsers and not self._flag:
            return "--no-native-parsers is for use with one of the flags --vllm-processing and its like."
        return ""

    def note(self, engine: str) -> str:
        """What an operator has to be told about the choice, in one sentence; empty for nothing."""
        if not self.native_framework_processing or engine in NATIVE_CODE:
            return ""
        return (
            f"--native-framework-processing: the engine {engine} brings no code for prompts and answers, so Sluice's "
            f"own is used; {' and '.join(sorted(set(NATIVE_CODE.values())))} bring theirs"
        )

    def served(self, model: ModelSpec, engine: str) -> ModelSpec:
        """The model as preprocess and postprocess load it at their start, without waiting for its worker's card."""
        if not self.native_framework_processing or model.processor:
            return model
        native = NATIVE_CODE.get(engine, "")
        if not native and not is_hub_id(model.source):
            native = detect_processor(resolve(model.source))
        return replace(model, processor=native)

    def preprocess_arguments(self) -> tuple[str, ...]:
        """What preprocess is told."""
        return (*self._flag, *self._pythons())

    def postprocess_arguments(self) -> tuple[str, ...]:
        """What postprocess is told."""
        return (*(self._flag if self.native_parsers else ()), *self._pythons())

    @property
    def _flag(self) -> Sequence[str]:
        return [f"--{name.replace('_', '-')}" for name in FLAGS if getattr(self, name)]

    def _pythons(self) -> Iterator[str]:
        for one in fields(self):
            if one.name.endswith("_python") and (python := getattr(self, one.name)):
                yield from (f"--{one.name.replace('_', '-')}", python)
