"""`sluice tokens`: what it makes, how tokens rotate, and what it says."""

from __future__ import annotations

import stat
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import SecretStr

from services.common.security.bearer_tokens import accepted_tokens, digest_of, shown_tokens
from sluice.cli.errors import BadFlag
from sluice.cli.main import main
from sluice.cli.tokens import ACCEPTED, CALLS, SHOWN, Options, make

NONE = SecretStr("")


def arrows(folder: Path) -> dict[tuple[str, str], list[str]]:
    """Who shows which tokens to whom, as the services read the files."""
    found: dict[tuple[str, str], list[str]] = {}
    for path in folder.glob(f"*/{SHOWN}"):
        for line in path.read_text().splitlines():
            secret, callee = line.split()
            found.setdefault((path.parent.name, callee), []).append(secret)
        assert shown_tokens(NONE, path) is not None
    return found


def works(folder: Path, caller: str, callee: str, secret: str) -> bool:
    """Whether the callee accepts a token, as that of the caller."""
    tokens = accepted_tokens(NONE, folder / callee.replace("/", "-") / ACCEPTED)
    assert tokens is not None
    named = [token.caller.name for token in tokens() if f"sha256:{token.digest.hex()}" == digest_of(secret)]
    assert named in ([], [caller.replace("worker-", "worker/")])
    return bool(named)


def test_each_pair_of_services_has_a_separate_token(tmp_path: Path) -> None:
    (said,) = make(tmp_path / "made" / "here", Options())
    folder = tmp_path / "made" / "here"
    found = arrows(folder)
    assert set(found) == {(a, b) for a, callees in CALLS.items() if a != "scheduler" for b in callees}
    secrets = [secret for tokens in found.values() for secret in tokens]
    assert len(set(secrets)) == len(secrets) == len(found)
    assert f"created {len(found)} tokens" in said
    assert not any(secret in said for secret in secrets)
    for (caller, callee), (secret,) in found.items():
        accepting = [
            name for name in ("preprocess", "router", "postprocess", "worker") if works(folder, caller, name, secret)
        ]
        assert accepting == [callee]
    for path in folder.rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_tokens_for_each_worker_alone(tmp_path: Path) -> None:
    make(tmp_path, Options(workers=("a", "b"), scheduler=True))
    found = arrows(tmp_path)
    assert {caller for caller, _ in found} == {*CALLS, "worker-a", "worker-b"} - {"worker"}
    assert {callee for caller, callee in found if caller == "gateway"} >= {"worker/a", "worker/b"}
    (secret,) = found["gateway", "worker/a"]
    assert works(tmp_path, "gateway", "worker/a", secret)
    assert not works(tmp_path, "gateway", "worker/b", secret)
    (mine,) = found["worker-a", "router"]
    assert works(tmp_path, "worker-a", "router", mine)


def test_what_is_there_stays_and_what_is_missing_is_added(tmp_path: Path) -> None:
    make(tmp_path, Options())
    before = arrows(tmp_path)
    assert "kept the 14 tokens" in make(tmp_path, Options())[0]
    assert arrows(tmp_path) == before
    make(tmp_path, Options(scheduler=True))
    after = arrows(tmp_path)
    assert {arrow: after[arrow] for arrow in before} == before
    assert {caller for caller, _ in after.keys() - before.keys()} == {"scheduler"}


def test_rotation_has_a_valid_token_at_every_step(tmp_path: Path) -> None:
    make(tmp_path, Options())
    old = {arrow: tokens[0] for arrow, tokens in arrows(tmp_path).items()}

    def accepted(tokens: dict[tuple[str, str], str]) -> set[bool]:
        return {works(tmp_path, caller, callee, secret) for (caller, callee), secret in tokens.items()}

    make(tmp_path, Options(rotate="prepare"))
    new = {arrow: tokens[1] for arrow, tokens in arrows(tmp_path).items()}
    assert {arrow: tokens[0] for arrow, tokens in arrows(tmp_path).items()} == old, "the first one is shown"
    assert accepted(old) == accepted(new) == {True}
    make(tmp_path, Options(rotate="switch"))
    assert {arrow: tokens for arrow, (tokens,) in arrows(tmp_path).items()} == new
    assert accepted(old) == accepted(new) == {True}
    make(tmp_path, Options(rotate="finish"))
    assert accepted(old) == {False}
    assert accepted(new) == {True}


@pytest.mark.parametrize(("steps", "message"), [
    (("switch",), "prepare first"),
    (("prepare", "prepare"), "already prepared"),
    (("prepare", "finish"), "switch first"),
])  # fmt: skip
def test_a_step_out_of_order_changes_nothing(tmp_path: Path, steps: tuple[str, ...], message: str) -> None:
    make(tmp_path, Options())
    for step in steps[:-1]:
        make(tmp_path, Options(rotate=step))
    before = {path: path.read_bytes() for path in tmp_path.glob("*/*")}
    with pytest.raises(BadFlag, match=message):
        make(tmp_path, Options(rotate=steps[-1]))
    assert {path: path.read_bytes() for path in tmp_path.glob("*/*")} == before


@pytest.mark.parametrize("worker_id", ["", "a/b", "..", "a b", "-x"])
def test_a_worker_that_cannot_name_a_folder_is_refused(tmp_path: Path, worker_id: str) -> None:
    with pytest.raises(BadFlag, match="--worker"):
        make(tmp_path, Options(workers=(worker_id,)))
    assert not any(tmp_path.iterdir())


def test_a_file_that_is_none_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make(tmp_path, Options())
    (tmp_path / "gateway" / SHOWN).write_text("hush\n")
    monkeypatch.setattr(sys, "argv", ["sluice", "tokens", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1
    assert "Line 1 of" in printed
    assert "hush" not in printed


def test_in_a_container_every_user_of_a_services_volume_can_read_it(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sluice.cli.tokens", str(tmp_path)]
    for _ in range(2):
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "kept the 14 tokens" in done.stdout
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.glob("*/*")} == {0o444}
