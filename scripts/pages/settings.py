"""docs/settings.md, all settings of the services and flags of the command line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import typer
from pydantic import SecretStr
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from scripts.pages.markdown import NOTICE, code, table
from services.common.settings.service import GrpcServiceSettings, ServiceSettings
from services.gateway.settings import GatewaySettings
from services.postprocess.settings import PostprocessSettings
from services.preprocess.settings import PreprocessSettings
from services.router.settings import RouterSettings
from services.worker.settings import WorkerSettings
from sluice.cli.commands import app

SERVICES: Mapping[str, type[ServiceSettings]] = {
    "gateway": GatewaySettings,
    "preprocess": PreprocessSettings,
    "router": RouterSettings,
    "worker": WorkerSettings,
    "postprocess": PostprocessSettings,
}
LIMITS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}

HEAD = f"""# Settings

{NOTICE}

Every setting of a service is a flag (such as of `python -m services.router`), an environment variable and a file in
`/run/secrets`: `--log-level` of the router is `SLUICE_ROUTER_LOG_LEVEL`, and the file `sluice_router_log_level`. Flags
override variables, variables override files. A misspelt variable has no effect, and the service logs a warning about it
at startup. A list is given by repeating the flag or as one value with commas. Boolean settings have a second flag that
switches them off, such as `--no-reflection`. SERVICE in a variable stands for the name of the service.

`sluice up` has separate flags, listed below; set any other setting of its services through its variable. The flags of
`sluice worker` are those of the [worker](#worker). The variables of Compose are in [compose](compose.md#variables).

- [Every service](#every-service), [every gRPC service](#every-grpc-service)
- [Gateway](#gateway), [preprocess](#preprocess), [router](#router), [worker](#worker), [postprocess](#postprocess)
- [The command `sluice`](#the-command-sluice)
"""
GRPC_SERVICES = "Preprocess, router, worker and postprocess have these as well."


class Setting(NamedTuple):
    """A row of the page; `meaning` may end with the allowed values."""

    flag: str
    variable: str
    default: str
    meaning: str


def settings_of(kind: type[ServiceSettings], prefix: str, without: Sequence[type[ServiceSettings]]) -> list[Setting]:
    """Returns the settings of a class that the other classes do not share, in declaration order."""

    def is_common(name: str, field: FieldInfo) -> bool:
        found = [other.model_fields[name] for other in without if name in other.model_fields]
        return any((one.default, one.description) == (field.default, field.description) for one in found)

    return [
        Setting(flag_of(name), f"{prefix}{name.upper()}", default_of(field), meaning_of(field))
        for name, field in kind.model_fields.items()
        if field.description and not is_common(name, field)
    ]


def flag_of(name: str) -> str:
    """Returns the flag of a field."""
    return f"--{name.replace('_', '-')}"


def default_of(field: FieldInfo) -> str:
    """Returns the default as it would be written; empty for none, and for one that depends on the machine."""
    value = field.default
    if isinstance(value, SecretStr):
        value = value.get_secret_value()
    if value is PydanticUndefined or value is None:
        return ""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ",".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) and value < 1e6 else str(value)


def meaning_of(field: FieldInfo) -> str:
    """Returns the description, with the allowed values."""
    allowed = choices_of(field.annotation)
    if allowed:
        limits = "one of " + ", ".join(f"`{value}`" for value in allowed)
    else:
        bounds = [
            (words, getattr(one, name))
            for one in field.metadata
            for name, words in LIMITS.items()
            if hasattr(one, name)
        ]
        limits = ", ".join(f"{words} {bound:g}" for words, bound in bounds)
    return f"{field.description}; {limits}" if limits else str(field.description)


def choices_of(annotation: Any) -> tuple[str, ...]:
    """Returns the values of a Literal, or of an optional one."""
    if get_origin(annotation) is Literal:
        return tuple(map(str, get_args(annotation)))
    return tuple(value for part in get_args(annotation) if part is not type(None) for value in choices_of(part))


def commands() -> dict[str, tuple[str, list[Setting]]]:
    """Returns, by command such as ``sluice keys create``, its help text, arguments and flags."""
    return {
        f"sluice {name}": (" ".join((command.help or "").split()), list(_flags(command)))
        for name, command in _walk(typer.main.get_command(app), "")
        if not getattr(command, "commands", {})
    }


def _walk(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    yield name, command
    for word, inner in getattr(command, "commands", {}).items():
        yield from _walk(inner, f"{name} {word}".strip())


def _flags(command: Any) -> Iterator[Setting]:
    hints = get_type_hints(command.callback)
    for one in command.params:
        if one.name not in hints:
            continue  # --help
        names = ", ".join([*one.opts, *one.secondary_opts]) if one.opts[0].startswith("-") else _argument(one)
        default = "on" if one.default is True else "" if one.default in (None, "", False, ()) else str(one.default)
        allowed = ", ".join(f"`{choice}`" for choice in choices_of(hints[one.name]))
        meaning = f"{one.help or ''}; one of {allowed}" if allowed else one.help or ""
        yield Setting(names, one.envvar or "", default, meaning)


def _argument(one: Any) -> str:
    name = one.metavar or one.name.upper()
    return name if one.required else f"[{name}]"


def page() -> str:
    """Returns the content of docs/settings.md."""
    parts = [HEAD]
    parts += ["## Every service\n", _table(settings_of(ServiceSettings, "SLUICE_SERVICE_", ())), ""]
    grpc = settings_of(GrpcServiceSettings, "SLUICE_SERVICE_", (ServiceSettings,))
    parts += ["## Every gRPC service\n", f"{GRPC_SERVICES}\n", _table(grpc), ""]
    for service, kind in SERVICES.items():
        common = (GrpcServiceSettings, ServiceSettings) if issubclass(kind, GrpcServiceSettings) else (ServiceSettings,)
        parts += [f"## {service.capitalize()}\n", _table(settings_of(kind, f"SLUICE_{service.upper()}_", common)), ""]
    parts.append("## The command `sluice`\n")
    for name, (meaning, flags) in commands().items():
        parts += [f"### {name}\n", f"{meaning}\n", *([_table(flags), ""] if flags else [])]
    return "\n".join(parts).rstrip() + "\n"


def _table(settings: Sequence[Setting]) -> str:
    return table("flag", "variable", "default", "meaning", rows=map(_row, settings))


def _row(setting: Setting) -> list[str]:
    cells = [*(", ".join(map(code, cell.split(", "))) for cell in setting[:3]), setting.meaning]
    return [cell.replace("|", "\\|") for cell in cells]
