"""docs/router.md lists the policies that there are, and which of them `--policy` takes."""

from __future__ import annotations

import re
from random import Random
from typing import get_args

from services.router.scheduling.policies import all_policies
from services.router.settings import PolicyName
from tests.support.repository import ROOT

PAGE = ROOT / "docs/router.md"
ROW = re.compile(r"^\| `(\w+)`[^|]*\|[^|]*\|[^|]*\| (yes|no)\b", re.MULTILINE)


def test_policies_page_lists_every_policy_and_where_it_is_accepted() -> None:
    section = PAGE.read_text().partition("## Policies")[2].partition("\n## ")[0]
    listed = dict(ROW.findall(section))
    assert listed.keys() == all_policies(Random()).keys()
    assert {name for name, setting in listed.items() if setting == "yes"} == set(get_args(PolicyName))
