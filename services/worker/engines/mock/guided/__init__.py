"""Output that keeps to a constraint: a text is made that satisfies it, and is then what the engine says.

Limits: a JSON schema is read for what its keywords demand of one example (see `schema`); a regular expression is one of
Python's without look-around, back-references, atomic groups and possessive repetitions; grammars and structural tags
are not understood and not claimed. Whatever is out of reach, or takes more work than `Effort` allows, is refused,
never ignored. The work is bounded, but not short: do it off the event loop.
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
    """A text that satisfies the constraint, the same one for the same state of `random`.

    Args:
        effort: what it may cost; by default what `Effort` allows, and any time.

    Raises:
        SluiceError: INVALID_ARGUMENT when the document is wrong or the mock cannot follow it.
    """
    try:
        text = _text(guided, random, effort or Effort())
        text.encode()
        return text
    except UnsupportedSchema as limit:
        raise _refused(f"The mock engine cannot follow this {guided.kind}: {limit}.") from None
    except UnicodeEncodeError:
        raise _refused(f"No text of Unicode satisfies this {guided.kind}.") from None
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError):
        raise _refused(f"This {guided.kind} has a keyword with a value of the wrong kind.") from None
    except RecursionError:
        raise _refused(f"This {guided.kind} is nested too deeply.") from None


def _refused(message: str) -> SluiceError:
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
    raise UnsupportedSchema("the engine does not understand it")
