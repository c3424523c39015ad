"""Parses the ground truth of the Berkeley Function Calling Leaderboard in every built-in parser's format.

The calls are read from the package `bfcl-eval` in a folder of its own, and rendered by `call_formats`:

    make test-bfcl
    make test-bfcl ARGS="--format qwen3_coder --splits 20"

Each text is parsed whole, one character at a time and in random pieces. A call counts if its name and its arguments are
equal to those that were rendered, types included. Formats without types are measured with the tools' schemas as they
are and with every argument nullable, in both spellings. A miss is the format's own if the text cannot tell the value
from what was parsed; any other fails the run.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.postprocess.detokenize.vocabulary import ParserNames
from services.postprocess.parsers.base import ParserContext
from tests.support.data.call_formats import FORMATS, Call, CallFormat
from tests.support.oracles.parsing import parsed, pieces_of

_TYPES = {
    **dict.fromkeys(("string", "String", "char"), "string"),
    **dict.fromkeys(("integer", "long", "short", "byte", "Bigint"), "integer"),
    **dict.fromkeys(("float", "double", "number"), "number"),
    **dict.fromkeys(("boolean", "Boolean", "bool"), "boolean"),
    **dict.fromkeys(("array", "Array", "ArrayList", "list", "tuple", "Queue", "Stack"), "array"),
    **dict.fromkeys(("dict", "object", "HashMap", "Hashtable"), "object"),
}
_DOCUMENTS = {
    "GorillaFileSystem": "gorilla_file_system",
    "MathAPI": "math_api",
    "MessageAPI": "message_api",
    "TwitterAPI": "posting_api",
    "TicketAPI": "ticket_api",
    "TradingBot": "trading_bot",
    "TravelAPI": "travel_booking",
    "VehicleControlAPI": "vehicle_control",
}
SCHEMAS = ("plain", "type list", "anyOf")
FAULTS_SHOWN = 20


@dataclass(frozen=True)
class Answer:
    """The calls of one answer, and the schemas of its tools' parameters by name."""

    id: str
    calls: tuple[Call, ...]
    schemas: dict[str, dict[str, Any]]


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines() if line.strip()]


def _schema(given: Any) -> dict[str, Any]:
    """A schema of the leaderboard as JSON Schema."""
    found = {key: value for key, value in given.items() if key in ("enum", "default", "description")}
    if kind := _TYPES.get(given.get("type", "")):
        found["type"] = kind
    if isinstance(given.get("items"), dict):
        found["items"] = _schema(given["items"])
    if isinstance(given.get("properties"), dict):
        found["properties"] = {name: _schema(inner) for name, inner in given["properties"].items()}
    return found


def _chosen(options: Any) -> Any:
    """The value of a ground truth, which lists the right ones; the empty text also means that it may be left out."""
    return next((value for value in options if value != ""), None)


def _resolved(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            key: _resolved(_chosen(inner) if isinstance(inner, list) and inner else inner)
            for key, inner in value.items()
        }
    return (
        [_resolved(inner) if isinstance(inner, dict) else inner for inner in value]
        if isinstance(value, list)
        else value
    )


def single_turn(data: Path) -> Iterator[Answer]:
    """Yields the answers of the single-turn categories."""
    for path in sorted((data / "possible_answer").glob("BFCL_*.json")):
        if any(part in path.name for part in ("multi_turn", "memory", "web_search")):
            continue
        tools = {row["id"]: row["function"] for row in _lines(data / path.name)}
        for row in _lines(path):
            calls = []
            for truth in row["ground_truth"]:
                for name, options in truth.items():
                    given = {key: values for key, values in options.items() if any(one != "" for one in values)}
                    calls.append((name, {key: _resolved(_chosen(values)) for key, values in given.items()}))
            schemas = {tool["name"]: _schema(tool["parameters"]) for tool in tools[row["id"]]}
            yield Answer(row["id"], tuple(calls), schemas)


def multi_turn(data: Path) -> Iterator[Answer]:
    """Yields the turns of the multi-turn category `base`; the others have the same calls."""
    documents = {
        name: {
            tool["name"]: _schema(tool["parameters"]) for tool in _lines(data / "multi_turn_func_doc" / f"{file}.json")
        }
        for name, file in _DOCUMENTS.items()
    }
    classes = {row["id"]: row["involved_classes"] for row in _lines(data / "BFCL_v4_multi_turn_base.json")}
    for row in _lines(data / "possible_answer" / "BFCL_v4_multi_turn_base.json"):
        schemas = {name: tool for found in classes[row["id"]] for name, tool in documents[found].items()}
        for number, turn in enumerate(row["ground_truth"]):
            if turn:
                yield Answer(
                    f"{row['id']}, turn {number}", tuple(_python_call(text, schemas) for text in turn), schemas
                )


def _python_call(text: str, schemas: dict[str, dict[str, Any]]) -> Call:
    call = ast.parse(text, mode="eval").body
    assert isinstance(call, ast.Call)
    assert isinstance(call.func, ast.Name)
    keys = list(schemas[call.func.id]["properties"])
    given = {key: ast.literal_eval(value) for key, value in zip(keys, call.args, strict=False)}
    given |= {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
    return call.func.id, json.loads(json.dumps(given))


def _nullable(schema: dict[str, Any], spelling: str) -> dict[str, Any]:
    if spelling == "plain" or "type" not in schema:
        return schema
    rest = {key: value for key, value in schema.items() if key != "type"}
    if spelling == "type list":
        return {**rest, "type": [schema["type"], "null"]}
    return {"anyOf": [{"type": schema["type"]}, {"type": "null"}], **rest}


def context_of(answer: Answer, spelling: str) -> ParserContext:
    """The request of an answer."""
    tools = []
    for name, schema in answer.schemas.items():
        properties = {key: _nullable(inner, spelling) for key, inner in schema.get("properties", {}).items()}
        function = {"name": name, "parameters": {"type": "object", "properties": properties}}
        tools.append({"type": "function", "function": function})
    return ParserContext(tools, identity=answer.id)


def _same(one: Any, other: Any) -> bool:
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def _is_complete(schema: dict[str, Any]) -> bool:
    """Whether a schema has a type for every value in it."""
    if schema.get("type") == "array":
        return "items" in schema and _is_complete(schema["items"])
    if schema.get("type") == "object":
        return bool(schema.get("properties")) and all(map(_is_complete, schema["properties"].values()))
    return "type" in schema


def _conforms(value: Any, schema: dict[str, Any]) -> bool:
    """Whether a value and all values in it have the types of a schema."""
    kinds: dict[str, type | tuple[type, ...]] = {
        "string": str,
        "integer": int,
        "number": (int, float),
        "boolean": bool,
        "array": list,
        "object": dict,
    }
    if "type" in schema and not isinstance(value, kinds[schema["type"]]):
        return False
    if isinstance(value, list):
        return all(_conforms(inner, schema.get("items", {})) for inner in value)
    if isinstance(value, dict):
        return all(_conforms(inner, schema.get("properties", {}).get(key, {})) for key, inner in value.items())
    return True


def reason_of(call: Call, parsed_arguments: str, schema: dict[str, Any], spelling: str) -> str:
    """Why a call of a format without types was not parsed as rendered; empty for a fault of the parser."""
    try:
        found = json.loads(parsed_arguments)
    except ValueError:
        return ""
    if list(found) != list(call[1]):
        return ""
    reasons = set()
    for key, wanted in call[1].items():
        if _same(found[key], wanted):
            continue
        kind = schema.get("properties", {}).get(key, {}).get("type")
        null = spelling != "plain" or schema["properties"].get(key, {}).get("default", "") is None
        if kind is None:
            reasons.add("argument without a type")
        elif kind == "string" and isinstance(wanted, str):
            reasons.add('the text "null" where null is allowed' if null and found[key] is None else "")
        elif kind == "string":
            reasons.add("value that the schema does not allow")
        else:
            if kind in ("array", "object") and not _is_complete(schema["properties"][key]):
                reasons.add("inner value without a type")
                continue
            reasons.add("" if _conforms(wanted, schema["properties"][key]) else "value that the schema does not allow")
    return "" if "" in reasons else ", ".join(sorted(reasons))


def check(format_: CallFormat, spelling: str, answer: Answer, splits: int, draw: random.Random) -> list[str]:
    """Returns a reason for each call of an answer that was not parsed as rendered, empty for a fault of the parser.

    Raises:
        AssertionError: the result depends on the split, or text around the calls was lost.
    """
    names = ParserNames(format_.parser, "harmony" if format_.parser == "harmony" else "")
    text, context = format_.render(answer.calls), context_of(answer, spelling)
    whole = parsed(names, [text], context)
    assert parsed(names, list(text), context) == whole, f"{answer.id}: one character at a time: {text!r}"
    for _ in range(splits):
        cuts = [draw.randint(0, len(text)) for _ in range(draw.randint(1, 12))]
        assert parsed(names, pieces_of(text, cuts), context) == whole, f"{answer.id}: cut at {sorted(cuts)}: {text!r}"
    if [call[0] for call in whole.calls] != [name for name, _ in answer.calls]:
        return [""] * len(answer.calls)
    reasons = []
    for call, (_, arguments, _) in zip(answer.calls, whole.calls, strict=True):
        try:
            right = _same(json.loads(arguments), call[1])
        except ValueError:
            right = False
        if not right:
            schema = answer.schemas.get(call[0], {})
            reasons.append(reason_of(call, arguments, schema, spelling) if format_.untyped else "")
    return reasons if not whole.degraded and not whole.content else [""] * len(answer.calls)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; 1 when a miss is not the format's own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--package", type=Path, required=True, help="folder with the package bfcl_eval")
    parser.add_argument("--format", action="append", choices=sorted(FORMATS), help="only these; repeatable")
    parser.add_argument("--splits", type=int, default=5, help="random splits of each text")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    data = options.package / "bfcl_eval" / "data"
    parts = {"single-turn": list(single_turn(data)), "multi-turn": list(multi_turn(data))}
    print("| format | schemas | single-turn | multi-turn | all | misses, each the format's own |")
    print("| --- | --- | --- | --- | --- | --- |")
    faults, parses, started = 0, 0, time.monotonic()
    for name in options.format or FORMATS:
        for spelling in SCHEMAS if FORMATS[name].untyped else SCHEMAS[:1]:
            calls, misses, own = Counter[str](), Counter[str](), Counter[str]()
            for part, answers in parts.items():
                for number, answer in enumerate(answers):
                    draw = random.Random(f"{options.seed} {answer.id}")
                    reasons = check(FORMATS[name], spelling, answer, options.splits, draw)
                    if "" in reasons and faults < FAULTS_SHOWN:
                        print(f"FAULT {answer.id}: {FORMATS[name].render(answer.calls)!r}", file=sys.stderr)
                    faults += reasons.count("")
                    parses += options.splits + 2
                    own.update(reasons)
                    for column in (part, "all"):
                        calls[column] += len(answer.calls)
                        misses[column] += len(reasons)
                    if sys.stderr.isatty() and number % 100 == 0:
                        print(f"\r{name}, {spelling}: {number:,} of {len(answers):,} ", end="", file=sys.stderr)
            cells = " | ".join(
                f"{1 - misses[column] / calls[column]:.2%} of {calls[column]:,}" for column in (*parts, "all")
            )
            named = "; ".join(f"{count} × {reason or 'FAULT'}" for reason, count in own.most_common()) or "–"
            print(f"| {name} | {spelling} | {cells} | {named} |", flush=True)
    print(f"\n{parses:,} parses, {faults} faults of the parsers, {time.monotonic() - started:.0f} s")
    return int(faults > 0)


if __name__ == "__main__":
    raise SystemExit(main())
