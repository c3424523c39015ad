"""The contract for parsers of tool calls and reasoning, and the tools that the built-in ones are made of.

A parser is a class derived from `Parser`, named by `--own-parsers` of postprocess and run in a limited process
(docs/parsers.md, which has an example).
"""

from services.postprocess.parsers.base import Chain, Parser, ParserContext
from services.postprocess.parsers.events import CallArguments, CallStart, Content, Degraded, Event, Reasoning, merge
from services.postprocess.parsers.scanning.markers import Found, Markers, TextBuffer, WhitespaceBuffer

__all__ = [
    "CallArguments",
    "CallStart",
    "Chain",
    "Content",
    "Degraded",
    "Event",
    "Found",
    "Markers",
    "Parser",
    "ParserContext",
    "Reasoning",
    "TextBuffer",
    "WhitespaceBuffer",
    "merge",
]
