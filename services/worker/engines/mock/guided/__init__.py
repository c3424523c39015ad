"""Output that keeps to a constraint: a text is made that satisfies it, and is then what the engine says.

Limits: a JSON schema is read for what its keywords demand of one example (see `schema`); a regular expression is one of
Python's without look-around and back-references; grammars and structural tags are not understood and not claimed.
Whatever is out of reach is refused, never ignored.
"""

from __future__ import annotations

import json
from random import Random

from services.common.errors import invalid
from services.worker.engines.mock.guided.example import OutOfReach
from services.worker.engines.mock.guided.regex import matching
from services.worker.engines.mock.guided.schema import Examples
from services.worker.generation import Guided


def guided_text(guided: Guided, random: Random) -> str:
    """A text that satisfies the constraint, the same one for the same state of `random`.

    Raises:
        SluiceError: INVALID_ARGUMENT when the document is wrong or the mock cannot follow it.
    """
    try:
        if guided.kind == "choice":
            return random.choice(tuple(guided.grammar))
        if guided.kind == "json_object":
            return json.dumps({"answer": random.choice(("river", "gate", "bridge"))})
        if guided.kind == "regex":
            return matching(str(guided.grammar), random)
        if guided.kind == "json_schema":
            schema = json.loads(str(guided.grammar))
            return json.dumps(Examples(schema, random).of(schema), ensure_ascii=False)
    except OutOfReach as limit:
        raise invalid(f"The mock engine cannot follow this {guided.kind}: {limit}.", param="response_format") from None
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError):
        raise invalid(
            f"This {guided.kind} has a keyword with a value of the wrong kind.", param="response_format"
        ) from None
    except RecursionError:
        raise invalid(f"This {guided.kind} is nested too deeply.", param="response_format") from None
    raise invalid(f"The mock engine does not understand {guided.kind}.", param="response_format")
