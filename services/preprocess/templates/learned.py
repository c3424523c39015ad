"""What the templates of models show, learned when a model is loaded, in a process that can be killed."""

from __future__ import annotations

import logging
from collections import OrderedDict
from threading import Lock
from time import monotonic
from typing import TYPE_CHECKING

from services.common.base.errors import ErrorKind, SluiceError
from services.preprocess.contract.tokenizer import Message, Tool
from services.preprocess.templates import templates
from services.preprocess.templates.capabilities import UNKNOWN, TemplateCapabilities
from services.preprocess.templates.learning import CannotProbe, learn

if TYPE_CHECKING:
    from services.preprocess.templates.processes import TemplateProcesses

log = logging.getLogger(__name__)

_FAILS = (ErrorKind.INVALID_ARGUMENT, ErrorKind.FAILED_PRECONDITION)
"""Errors of a probe that a template cannot show; all others are of the process."""
_known: OrderedDict[tuple[str, str], TemplateCapabilities] = OrderedDict()
_lock = Lock()


def learned(processes: TemplateProcesses, source: str, special: dict[str, str]) -> TemplateCapabilities:
    """Returns what a model's template shows; where a probe hangs or ends its process, what was learned before.

    Args:
        special: variables that every chat has.
    """
    key = source, repr(sorted(special.items()))
    with _lock:
        if (known := _known.get(key)) is not None:
            return known
    try:
        known = _learn(processes, source, special)
    except SluiceError as error:  # no process now; another model with this template tries again
        log.warning("a chat template was not probed", extra={"reason": error.message})
        return UNKNOWN
    with _lock:
        _known[key] = known
        while len(_known) > templates.CACHED_TEMPLATES:
            _known.popitem(last=False)
    return known


def _learn(processes: TemplateProcesses, source: str, special: dict[str, str]) -> TemplateCapabilities:
    runner = processes.prober()
    further = {"documents": None, "add_generation_prompt": True}

    def show(messages: list[Message], tools: list[Tool] | None) -> str | None:
        began = monotonic()
        try:
            return runner.probe(source, {**special, **further, "messages": messages, "tools": tools})
        except SluiceError as error:
            # Only a probe that hangs: on a busy machine, those that are refused may take long together.
            hangs = monotonic() - began >= processes.limit_s
            if error.kind not in _FAILS or error.code == templates.OUT_OF_MEMORY or hangs:
                log.warning("a chat template was not probed to the end", extra={"reason": error.message})
                raise CannotProbe from error
            return None

    try:
        runner.compile(source)  # starts the process, which may take longer than a probe
        return learn(show)
    finally:
        runner.close()
