"""A newcomer's walk: every command of README and docs that needs no GPU, cluster or registry is run from the pages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.walk.pages import REASONS, BadPage, Block, blocks_in, blocks_of, commands_of, pages
from tests.walk.runner import Failed, Suite, Walk

README = "README.md"
STARTS = ("sluice up", "make run")
BEFORE = {"docs/preprocessing.md": ("docs/parsers.md",)}
"""Pages whose files another page uses."""


def to_run(page: str) -> list[Block]:
    return [block for block in blocks_of(page) if not block.reason]


WALKED = [page for page in pages() if any(block.kind != "file" for block in to_run(page))]


def starts_a_suite(page: str) -> bool:
    """Whether the page starts a suite; the others talk to the one of the README."""
    texts = [block.text for block in to_run(page) if block.kind in ("shell", "console")]
    return any(word in text for text in texts for word in STARTS)


@pytest.fixture(scope="module")
def readmes_suite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Suite]:
    """The suite that the README's first command starts."""
    commands = [command for block in to_run(README) if block.kind == "shell" for command in commands_of(block)]
    first = next(command for command in commands if command.startswith("make run"))
    with Walk(tmp_path_factory.mktemp("walk-suite")) as walk:
        walk.command(first)
        assert walk.suite is not None
        yield walk.suite


@pytest.mark.parametrize("page", WALKED)
def test_commands_of_the_page_run(page: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    shared = page == README or not starts_a_suite(page)
    suite: Suite | None = request.getfixturevalue("readmes_suite") if shared else None
    given = [block for other in BEFORE.get(page, ()) for block in blocks_of(other) if block.kind == "file"]
    with Walk(tmp_path, suite) as walk:
        for block in [*given, *to_run(page)]:
            walk.run(block)


@pytest.mark.parametrize("page", pages())
def test_marks_of_the_page_are_known_and_needed(page: str) -> None:
    assert all(block.reason in ("", *REASONS) for block in blocks_of(page))


def test_readme_and_docs_have_commands_to_run() -> None:
    assert README in WALKED
    assert sum(len(to_run(page)) for page in WALKED) > 15


MARKED = """Text.

<!-- walk: {reason} -->
```sh
docker build .
```
"""


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (MARKED.format(reason="lazy"), "page:5: the reason 'lazy' is unknown"),
        (MARKED.format(reason="cluster"), "page:5: the block shows nothing of its reason 'cluster'"),
        ("<!-- walk: docker -->\n\nNo block.\n", "page:1: the mark is not followed by a block"),
        ("<!-- walk: docker -->\n", "page:1: the mark is not followed by a block"),
    ],
)
def test_wrong_mark_is_refused(text: str, sentence: str) -> None:
    with pytest.raises(BadPage) as refused:
        blocks_in("page", text)
    assert sentence in str(refused.value)


@pytest.mark.parametrize(
    "block",
    [
        "```sh\nsluice no-such-command\n```",
        "```sh\nfalse | cat\n```",
        "```sh\nsluice version\ncat no-such-file\n```",
        "```python\nraise SystemExit(1)\n```",
        "```console\n$ sluice worker --model no-such-folder/x --engine steam\n```",
        "    export A=1\n    test $A = 2\n",
    ],
)
def test_page_with_a_command_that_does_not_work_fails_at_its_line(block: str, tmp_path: Path) -> None:
    (found,) = blocks_in("page", f"Text.\n\n{block}\n")
    with Walk(tmp_path) as walk, pytest.raises(Failed, match=f"page:{found.line}: "):
        walk.run(found)


def test_answer_with_an_error_status_fails(tmp_path: Path, readmes_suite: Suite) -> None:
    (wrong, right) = blocks_in(
        "page",
        "```sh\ncurl http://127.0.0.1:8000/no-such-path\n```\n\n```sh\ncurl http://127.0.0.1:8000/health\n```\n",
    )
    with Walk(tmp_path, readmes_suite) as walk:
        with pytest.raises(Failed, match="no-such-path"):
            walk.run(wrong)
        walk.run(right)
