"""What needs an extension that is missing is refused with one sentence, which names the extension and what to do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from services.common.base.errors import SluiceError
from services.common.child_rpc.child import ChildLimits
from services.common.packages import extensions
from services.common.packages.extensions import OWN, Extension, conflict_of, find_extension, load_group, problem_of
from services.postprocess.streams.parser_hosts import custom_host, engine_host
from services.preprocess.tokenizers.engine_extensions import (
    EngineOptions,
    NoImages,
    engine_tokenizer,
    processor_rule,
)
from sluice.cli.errors import BadFlag
from sluice.cli.up.engine_list import engine_list

USES: dict[str, Callable[[], object]] = {
    "file": lambda: engine_list(Path("engines.yaml")),
    "vllm": lambda: engine_tokenizer("vllm", Path(), EngineOptions(), ""),
    "image-processor": lambda: processor_rule(Path(), str, len, [EngineOptions()]),
    "custom": lambda: custom_host("module:Parser", ChildLimits(1.0, 64), None),
    "engine": lambda: engine_host("vllm", "", ChildLimits(1.0, 64), None),
}
"""Something that needs the extension of a name."""

PIP = 'the module absent_module is not installed; run: pip install "sluice-llm[worker]".'


def extension(name: str, distribution: str = OWN, target: str = "absent_module:Thing") -> Extension:
    return Extension("sluice.group", name, target, distribution, "1", "worker")


@pytest.mark.parametrize("name", USES)
@pytest.mark.parametrize("is_registered", [True, False])
def test_use_without_extension_is_one_sentence(name: str, is_registered: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extensions, "_extensions", lambda group: [extension(name)] if is_registered else [])
    with pytest.raises((SluiceError, BadFlag, NoImages)) as refused:
        USES[name]()
    message = str(refused.value)
    assert message.endswith(PIP if is_registered else ".")
    assert ("Extension " if is_registered else "extension") in message
    assert "\n" not in message


def test_name_that_two_packages_register_is_used_by_neither_and_one_of_the_suite_by_the_suite(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    foreign = [extension("twice", "steam", "json:loads"), extension("twice", "water", "json:dumps")]
    own, taker = extension("own", OWN, "json:loads"), extension("own", "steam", "json:dumps")
    monkeypatch.setattr(extensions, "_extensions", lambda group: [*foreign, taker, own])
    reported: list[str] = []
    loaded = load_group("sluice.group", reported.append)
    assert list(loaded.usable) == ["own"]
    assert find_extension("sluice.group", "own") == own
    assert reported == ["Extension twice is registered 2 times, by steam and water: uninstall all but one."]
    assert problem_of("sluice.group", "twice") == reported[0]
    assert conflict_of(taker, [taker, own]) == "Extension own of steam is not used: the suite has a built-in own."


def test_extension_without_packages_of_its_extra_has_a_problem_before_it_is_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    listed = [extension("a", target="json:loads"), extension("b"), extension("c", target="json:loads")]
    monkeypatch.setattr(extensions, "_extensions", lambda group: listed)
    assert problem_of("sluice.group", "a") == ""
    assert problem_of("sluice.group", "b") == (
        'Extension b of sluice-llm cannot be used: absent_module not installed; run: pip install "sluice-llm[worker]".'
    )
    assert problem_of("sluice.group", "d") == "The extension d is not installed."
    monkeypatch.setattr(extensions, "_required", lambda distribution, extra: ["absent-package"])
    assert "absent-package not installed; run: pip install" in problem_of("sluice.group", "c")
