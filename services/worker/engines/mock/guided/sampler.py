"""Generates a text that satisfies a structured output constraint.

Supports the JSON schema keywords listed in `schema`, and Python regular expressions without look-around,
back-references, word boundaries, atomic groups and possessive repetitions; does not support grammars and structural
tags. Constraints that are unsupported or exceed `Effort` are rejected, never ignored. The work is bounded but may take
a while: run it off the event loop.
"""

from __future__ import annotations

import json
from random import Random

from services.common.errors import SluiceError, invalid
from services.worker.contract.generation import StructuredOutput
from services.worker.engines.mock.guided.effort import MOST_CHARACTERS, Effort, UnsupportedSchema
from services.worker.engines.mock.guided.regex import matching
from services.worker.engines.mock.guided.schema import Examples


def guided_text(guided: StructuredOutput, random: Random, effort: Effort | None = None) -> str:
    """Returns a text that satisfies the constraint, determined by the state of `random`.

    Args:
        effort: Budget of the work; by default without a deadline.

    Raises:
        SluiceError: INVALID_ARGUMENT for an invalid or unsupported constraint.
    """
    try:
        text = _text(guided, random, effort or Effort())
        text.encode()
        return text
    except UnsupportedSchema as limit:
        raise _rejected(f"The mock engine does not support this {guided.kind}: {limit}.") from None
    except UnicodeEncodeError:
        raise _rejected(f"This {guided.kind} matches no valid Unicode text; use valid characters.") from None
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError):
        raise _rejected(f"This {guided.kind} has a keyword with a value of the wrong type.") from None
    except RecursionError:
        raise _rejected(f"This {guided.kind} is nested too deeply; simplify it.") from None


def _rejected(message: str) -> SluiceError:
    return invalid(message, param="response_format", code="invalid_value")


def _text(guided: StructuredOutput, random: Random, effort: Effort) -> str:
    if guided.kind == "choice":
        chosen: str = random.choice(tuple(guided.grammar))
        effort.write(len(chosen))
        return chosen
    if guided.kind == "json_object":
        return json.dumps({"answer": random.choice(("river", "gate", "bridge"))})
    if guided.kind == "regex":
        return matching(str(guided.grammar), random, effort)
    if guided.kind == "json_schema":
        schema = json.loads(str(guided.grammar))
        text = json.dumps(Examples(schema, random, effort).of(schema), ensure_ascii=False)
        if len(text) > MOST_CHARACTERS:
            raise UnsupportedSchema(f"an example is longer than {MOST_CHARACTERS} characters")
        return text
    raise UnsupportedSchema("this kind of constraint is not supported")
