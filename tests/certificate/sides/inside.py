"""Run by an engine's interpreter, with the engine and the number of a pipe for results: serves batches until standard
input ends. Facts come first, then a line of results for each line of cases; see `side`.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable
from typing import Any

from services.common.packages.engines import NOT_NEEDED, stand_in_for_absent

MAX_REASON = 300


def main(engine: str, pipe: int) -> None:
    """Serves the cases of `inside_ENGINE`, which has VERSION, APIS and ANSWERERS by kind of case."""
    stand_in_for_absent(*NOT_NEEDED.get(engine, ()))
    module = importlib.import_module(f"tests.certificate.sides.inside_{engine}")
    with os.fdopen(pipe, "w") as replies:
        print(json.dumps({"version": module.VERSION, "apis": module.APIS}), file=replies, flush=True)
        for line in sys.stdin:
            results = [_result(module.ANSWERERS[case["kind"]], case) for case in json.loads(line)]
            print(json.dumps(results), file=replies, flush=True)


def _result(answerer: Callable[[dict[str, Any]], dict[str, Any]], case: dict[str, Any]) -> dict[str, Any]:
    """Returns the result of a case; one that raises is refused."""
    try:
        return answerer(case)
    except Exception as error:
        reason = " ".join(str(error).split())[:MAX_REASON]
        return {"refused": f"{type(error).__name__}: {reason}"}


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
