"""docs/limits.md, every bound that is a constant, and the settings that are bounds.

Source of the rows: the constants of modules named `MAX_…` or `MIN_…`, with the docstring below each of them: what is
counted, with its unit first, then a semicolon and what happens at the bound. One without a semicolon bounds nothing
that a client, peer or operator can reach.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from pydantic.fields import FieldInfo

from scripts.pages import settings
from scripts.pages.markdown import NOTICE, code, table
from services.common.settings.service import GrpcServiceSettings, ServiceSettings

ROOT = Path(__file__).resolve().parents[2]
AREAS: Mapping[str, str] = {
    "services/gateway": "Gateway",
    "services/preprocess": "Preprocess",
    "services/router": "Router",
    "services/worker": "Worker",
    "services/postprocess": "Postprocess",
    "services/common": "Every service",
    "sluice": "The command `sluice`",
}
_NAME = re.compile(r"_?(MAX|MIN)_[A-Z0-9_]+")
_BOUND_WORDS = frozenset({"max", "min", "mb", "kb", "limit", "timeout"})
_BOUND_MEANING = re.compile(r"\b(maximum|at most|limit|longest)\b", re.IGNORECASE)
_OPERATORS: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.LShift: operator.lshift,
    ast.Pow: operator.pow,
}

HEAD = f"""# Limits

{NOTICE}

Every bound of the suite: its name in the code, its value, what it counts (the first word is the unit), and what happens
at it. A constant changes with the code only. `MIN_` are lower bounds, all others upper ones. *Refused* is
an error of the kind that is named, or else INVALID_ARGUMENT ([errors](errors.md)); one with a budget is also counted
([budgets](security.md#budgets)).

- [Settings](#settings): bounds that an operator can change
- {", ".join(f"[{title}](#{title.lower().replace(' ', '-').replace('`', '')})" for title in AREAS.values())}
- [Without effect outside](#without-effect-outside): sizes that no client, peer or operator reaches
"""
SETTINGS = """## Settings

The settings whose flag has one of the words max, min, mb, kb, limit and timeout, or whose meaning names a limit.
[Settings](settings.md) has their variables, and all others.
"""
TUNING = """## Without effect outside

Sizes of internal steps, intervals and estimates.
"""


class Limit(NamedTuple):
    """A constant.

    Attributes:
        module: path from the root of the repository.
        effect: what happens at the bound; empty for one that bounds nothing outside.
    """

    module: str
    name: str
    value: str
    subject: str
    effect: str


@cache
def constants(area: str) -> tuple[Limit, ...]:
    """Returns the documented bounds of the modules below a folder; private ones only if they have an effect."""
    found = (limit for path in _modules(area) for limit in limits_in(path.read_text("utf-8"), _module(path)))
    return tuple(limit for limit in found if limit.subject and (limit.effect or not limit.name.startswith("_")))


def undocumented() -> list[str]:
    """Returns the public bounds that have no docstring of their own, as MODULE: NAME."""
    found = (limit for area in AREAS for path in _modules(area) for limit in limits_in(path.read_text(), _module(path)))
    return [f"{limit.module}: {limit.name}" for limit in found if not limit.subject and not limit.name.startswith("_")]


def limits_in(source: str, module: str) -> Iterator[Limit]:
    """Yields the bounds that a module defines; `subject` is empty for those without a docstring."""
    body = ast.parse(source).body
    for statement, following in zip(body, [*body[1:], None], strict=True):
        names, value = _assigned(statement)
        for name in names:
            if not _NAME.fullmatch(name):
                continue
            described = following if len(names) == 1 else None  # a docstring below several names describes none
            subject, _, effect = _docstring(described).partition("; ")
            shown = _shown(value, module, subject) if subject and value is not None else ""
            yield Limit(module, name, shown, subject.removesuffix("."), effect.removesuffix("."))


def page() -> str:
    """Returns the content of docs/limits.md."""
    parts = [HEAD, SETTINGS, table("service", "setting", "default", "meaning", rows=_settings()), ""]
    for area, title in AREAS.items():
        parts.append(f"## {title}\n")
        packages: dict[str, list[Limit]] = {}
        for limit in constants(area):
            if limit.effect:
                packages.setdefault(_package(area, limit.module), []).append(limit)
        for package, limits in packages.items():
            rows = (_row(limit, limit.module.removeprefix(f"{package}/")) for limit in limits)
            parts += [f"### {package}\n", table("module", "name", "value", "of", "at the bound", rows=rows), ""]
    tuning = [limit for area in AREAS for limit in constants(area) if not limit.effect]
    rows = (_row(limit, limit.module)[:4] for limit in tuning)
    return "\n".join([*parts, TUNING, table("module", "name", "value", "of", rows=rows)]) + "\n"


def _modules(area: str) -> list[Path]:
    return sorted((ROOT / area).rglob("*.py")) if area != "sluice" else sorted((ROOT / area).glob("[!v]*/**/*.py"))


def _module(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _package(area: str, module: str) -> str:
    inside = module.removeprefix(f"{area}/").split("/")
    return f"{area}/{inside[0]}" if len(inside) > 1 else area


def _assigned(statement: ast.stmt) -> tuple[list[str], ast.expr | None]:
    if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
        return [statement.target.id], statement.value
    if not isinstance(statement, ast.Assign):
        return [], None
    return [node.id for target in statement.targets for node in ast.walk(target) if isinstance(node, ast.Name)], (
        statement.value
    )


def _docstring(statement: ast.stmt | None) -> str:
    match statement:
        case ast.Expr(value=ast.Constant(value=str(text))):
            return " ".join(text.partition("\n\n")[0].split())
    return ""


def _shown(node: ast.expr, module: str, subject: str) -> str:
    """Returns a value for readers: bytes in binary units, other numbers with commas, anything else as it is written."""
    try:
        value = _value(node, module)
    except LookupError:
        return ", ".join(map(ast.unparse, node.elts)) if isinstance(node, ast.Tuple) else code(ast.unparse(node))
    if isinstance(value, float):
        return f"{value:,g}"
    if subject.startswith("Bytes"):
        for shift, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
            if value >= 1 << shift and not value % (1 << shift):
                return f"{value >> shift} {unit}"
    return f"{value:,}"


def _value(node: ast.expr, module: str) -> Any:
    """Returns the value of an expression of numbers and names of modules; raises LookupError for any other."""
    match node:
        case ast.Constant(value=int() | float() as number):
            return number
        case ast.Name(id=name):
            return _value_of(name, module)
        case ast.BinOp(left=left, op=operation, right=right):
            return _OPERATORS[type(operation)](_value(left, module), _value(right, module))
    raise LookupError(ast.unparse(node))


def _value_of(name: str, module: str) -> Any:
    for statement in ast.parse((ROOT / module).read_text("utf-8")).body:
        names, value = _assigned(statement)
        if names == [name] and value is not None:
            return _value(value, module)
        if isinstance(statement, ast.ImportFrom) and any(alias.name == name for alias in statement.names):
            return _value_of(name, str(statement.module).replace(".", "/") + ".py")
    raise LookupError(name)


def _settings() -> Iterator[tuple[str, str, str, str]]:
    shared: set[str] = set()
    kinds: Mapping[str, type[ServiceSettings]] = {
        "every service": ServiceSettings,
        "every gRPC service": GrpcServiceSettings,
        **settings.SERVICES,
    }
    for service, kind in kinds.items():
        for name, field in kind.model_fields.items():
            if _is_bound(name, field) and name not in shared:
                meaning = settings.meaning_of(field).replace("|", "\\|")
                yield service, code(settings.flag_of(name)), code(settings.default_of(field)), meaning
        if service not in settings.SERVICES:
            shared |= kind.model_fields.keys()


def _is_bound(name: str, field: FieldInfo) -> bool:
    meaning = field.description or ""
    return bool(meaning) and (not _BOUND_WORDS.isdisjoint(name.split("_")) or bool(_BOUND_MEANING.search(meaning)))


def _row(limit: Limit, module: str) -> tuple[str, ...]:
    texts = (text.replace("|", "\\|") for text in (limit.subject, limit.effect))
    return (code(module), code(limit.name), limit.value, *texts)
