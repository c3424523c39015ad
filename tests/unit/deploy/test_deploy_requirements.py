"""The pinned requirements of the images: each pins what development does, for every Python that is supported."""

from __future__ import annotations

from collections import defaultdict

import pytest

from tests.support.repository import ROOT

REQUIREMENTS = ROOT / "requirements"
FILES = sorted(file.name for file in REQUIREMENTS.glob("*.txt") if file.name != "dev.txt")


def pins(name: str) -> dict[str, set[str]]:
    """Package → its "version ; marker" lines."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for line in (REQUIREMENTS / name).read_text().splitlines():
        if "==" in line and not line.startswith((" ", "#")):
            package, _, rest = line.removesuffix(" \\").partition("==")
            found[package].add(rest)
    return found


@pytest.mark.parametrize("name", FILES)
def test_versions_are_those_of_development_and_none_of_a_package_is_missing(name: str) -> None:
    everywhere = {package: {rest.partition(" ")[0] for rest in lines} for package, lines in pins("dev.txt").items()}
    here = {package: {rest.partition(" ")[0] for rest in lines} for package, lines in pins(name).items()}
    assert here
    assert {package: versions for package, versions in here.items() if versions != everywhere.get(package)} == {}
