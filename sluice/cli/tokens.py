"""`sluice tokens`: creates a token for each caller and callee, and the digests that the callees accept.

The folder of a service contains only what is mounted there: `shown-tokens`, the tokens that it sends, and
`accepted-tokens`, the digests of those that it accepts. The accepted digests are derived from the sent tokens.
"""

from __future__ import annotations

import argparse
import re
import secrets
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from services.common.base.errors import SluiceError
from services.common.security.bearer_tokens import digest_of, read_shown
from services.common.security.identity import OPERATOR, WORKER
from sluice.cli.errors import BadFlag
from sluice.cli.private_files import MODE, write

SHOWN, ACCEPTED = "shown-tokens", "accepted-tokens"
SCHEDULER = "scheduler"
CALLS: Mapping[str, Sequence[str]] = {
    "gateway": ("preprocess", "router", "worker", "postprocess"),
    "preprocess": ("router", "worker"),
    "postprocess": ("router", "worker"),
    "router": ("preprocess",),
    "worker": ("router",),
    SCHEDULER: ("preprocess", "router", "worker", "postprocess"),
    OPERATOR: ("preprocess", "router", "worker", "postprocess"),
}
"""The callees of each caller."""
BYTES = 32
READABLE = 0o444
_WORKER_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")

Arrow = tuple[str, str]
"""A caller and its callee, each a service or ``worker/ID``."""


@dataclass(frozen=True)
class Options:
    """Selects what to create: separate tokens for `workers`, tokens for a scheduler, a rotation step, the file mode."""

    workers: Sequence[str] = ()
    scheduler: bool = False
    rotate: str = ""
    mode: int = MODE


def make(folder: Path, options: Options) -> list[str]:
    """Creates missing tokens, then performs the rotation step, if any; returns a sentence about each.

    Raises:
        BadFlag: a file cannot be read or written, or the step does not come after the last one.
    """
    for worker_id in options.workers:
        if not _WORKER_ID.fullmatch(worker_id):
            raise BadFlag(f"--worker {worker_id!r} cannot name a folder; use letters, digits, '.', '-' and '_'.")
    try:
        return _make(folder, options)
    except OSError as error:
        raise BadFlag(f"{error.filename or folder}: {error.strerror}.") from error


def _make(folder: Path, options: Options) -> list[str]:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    shown, accepted = _read(folder)
    wanted = _arrows(options, existing={name for arrow in shown for name in arrow})
    fresh = [arrow for arrow in wanted if arrow not in shown]
    shown |= {arrow: [_new()] for arrow in fresh}
    done = [f"created {len(fresh)} tokens in {folder}"] if fresh else []
    if options.rotate:
        done.append(_rotate(shown, accepted, options.rotate))
    _write(folder, shown, accepted, options.mode)
    return done or [f"kept the {len(shown)} tokens in {folder}; --rotate replaces them"]


def _arrows(options: Options, existing: set[str]) -> list[Arrow]:
    workers = {f"{WORKER}/{worker_id}" for worker_id in options.workers}
    workers |= {name for name in existing if name.startswith(WORKER)} or (set() if workers else {WORKER})
    callers = [name for name in CALLS if name not in (WORKER, SCHEDULER)]
    callers += [SCHEDULER] if options.scheduler or SCHEDULER in existing else []
    found = [(worker, callee) for worker in sorted(workers) for callee in CALLS[WORKER]]
    for caller in callers:
        for callee in CALLS[caller]:
            found += [(caller, worker) for worker in sorted(workers)] if callee == WORKER else [(caller, callee)]
    return found


def _rotate(shown: dict[Arrow, list[str]], accepted: dict[Arrow, set[str]], step: str) -> str:
    prepared = all(len(tokens) > 1 for tokens in shown.values())
    if step == "prepare":
        if prepared:
            raise BadFlag(
                "New tokens are already prepared; give every service its accepted-tokens, then use --rotate switch."
            )
        for tokens in shown.values():
            tokens[1:] = [_new()]
        return "prepared: give every service its accepted-tokens, then use --rotate switch"
    if step == "switch":
        if not prepared:
            raise BadFlag("There are no new tokens to switch to; use --rotate prepare first.")
        for arrow, tokens in shown.items():
            accepted.setdefault(arrow, set()).update(map(digest_of, tokens))
            del tokens[0]
        return "switched: give every service its shown-tokens, then use --rotate finish"
    if prepared:
        raise BadFlag("The new tokens are not in use yet; use --rotate switch first.")
    accepted.clear()
    return "finished: give every service its accepted-tokens; the old tokens are invalid then"


def _new() -> str:
    return secrets.token_hex(BYTES)


def _folder(name: str) -> str:
    return name.replace("/", "-")


def _read(folder: Path) -> tuple[dict[Arrow, list[str]], dict[Arrow, set[str]]]:
    """Returns the sent tokens, in order, and the accepted digests, by caller and callee."""
    shown: dict[Arrow, list[str]] = {}
    accepted: dict[Arrow, set[str]] = {}
    for path in sorted(folder.glob(f"*/{SHOWN}")):
        caller = _name(path)
        try:
            found = read_shown(str(path), list(enumerate(_lines(path), 1)))
        except SluiceError as error:
            raise BadFlag(error.message) from error
        for token in found:
            shown.setdefault((caller, token.callee), []).append(token.secret)
    for path in sorted(folder.glob(f"*/{ACCEPTED}")):
        for line in _lines(path):
            digest, _, caller = line.partition(" ")
            accepted.setdefault((caller, _name(path)), set()).add(digest)
    return shown, accepted


def _name(path: Path) -> str:
    name = path.parent.name
    return f"{WORKER}/{name.removeprefix(f'{WORKER}-')}" if name.startswith(f"{WORKER}-") else name


def _lines(path: Path) -> list[str]:
    return [line for line in path.read_text("utf-8").splitlines() if line.strip()]


def _write(folder: Path, shown: Mapping[Arrow, Sequence[str]], accepted: Mapping[Arrow, set[str]], mode: int) -> None:
    callers = dict.fromkeys(caller for caller, _ in shown)
    callees = dict.fromkeys(callee for _, callee in shown)
    for name in {**callers, **callees}:
        (folder / _folder(name)).mkdir(mode=0o700, exist_ok=True)
    for callee in callees:  # before any new token is sent
        lines = [
            f"{digest} {caller}"
            for (caller, called), tokens in shown.items()
            if called == callee
            for digest in sorted({*map(digest_of, tokens), *accepted.get((caller, callee), ())})
        ]
        _write_lines(folder / _folder(callee) / ACCEPTED, lines, mode)
    for caller in callers:
        lines = [
            f"{token} {callee}" for (calling, callee), tokens in shown.items() if calling == caller for token in tokens
        ]
        _write_lines(folder / _folder(caller) / SHOWN, lines, mode)


def _write_lines(path: Path, lines: Iterable[str], mode: int) -> None:
    write(path, "".join(f"{line}\n" for line in lines).encode(), mode)


def main(argv: Sequence[str] | None = None) -> int:
    """Creates tokens for folders that are each mounted by one service only, under its own user.

    The files are readable by every user. Returns the exit code.
    """
    parser = argparse.ArgumentParser(
        prog="python -m sluice.cli.tokens",
        description="Create tokens, readable by every user, in folders that are each mounted by one service only.",
    )
    parser.add_argument("folder", type=Path, help="contains a folder for each service")
    try:
        for sentence in make(parser.parse_args(argv).folder, Options(mode=READABLE)):
            print(sentence)
    except BadFlag as error:
        print(f"tokens: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
