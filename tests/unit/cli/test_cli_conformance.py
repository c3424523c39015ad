from __future__ import annotations

import io
import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console

from services.common.base.errors import SluiceError
from sluice.cli.conformance import report as conformance
from sluice.conformance import Report, Result, Rule, Verdict, junit, select
from tests.support.repository import ROOT
from tests.unit.cli.conftest import Sluice

PAGE = ROOT / "docs" / "conformance.md"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "ADDRESS"),
        (("nowhere",), "host:port"),
        (("127.0.0.1:1",), "cannot be reached"),
        (("127.0.0.1:1", "--rule", "no-such-rule"), "no-such-rule"),
        (("127.0.0.1:1", "--patience", "0"), "--patience"),
        (("127.0.0.1:1", "--tls-ca", "/no/such/file"), "tls-ca"),
        (("127.0.0.1:1", "--tls", "/no/such/folder"), "--tls /no/such/folder has no ca.pem"),
        (("127.0.0.1:1", "--tls", "/no/such/folder", "--tls-ca", "/no/such/file"), "omit --tls-ca"),
        (("127.0.0.1:1", "--tls-cert", "/no/such/file"), "--tls-key"),
        (("127.0.0.1:1", "--stop-command", "kill 'me"), "--stop-command"),
    ],
)
def test_what_is_wrong_is_one_sentence_and_exit_code_two(
    arguments: tuple[str, ...], message: str, sluice: Sluice, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sluice("conformance", *arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("sluice: ")
    assert message in error
    assert "Traceback" not in error


def test_the_list_names_every_rule(sluice: Sluice, capsys: pytest.CaptureFixture[str]) -> None:
    assert sluice("conformance", "--list") == 0
    shown = capsys.readouterr().out
    assert [rule.name for rule in select() if rule.name not in shown] == []


def test_list_as_json_holds_every_rule(sluice: Sluice, capsys: pytest.CaptureFixture[str]) -> None:
    assert sluice("conformance", "--list", "--json") == 0
    listed = json.loads(capsys.readouterr().out)
    assert [rule["rule"] for rule in listed] == [rule.name for rule in select()]
    assert all(rule["proves"] and rule["clause"] for rule in listed)


def printed(report: Report, width: int) -> list[str]:
    """The table's lines in a terminal of this width."""
    console = Console(width=width, force_terminal=False, record=True, file=io.StringIO())
    console.print(conformance._table(report, width))
    return console.export_text().splitlines()


def test_narrow_terminal_has_a_line_for_each_rule_that_is_kept() -> None:
    report = Report("127.0.0.1:1", "mock 1")
    long = "a sentence that is longer than what is left of a line of eighty characters, by far"
    report.results = [result(verdict, long) for verdict in (Verdict.PASSED, Verdict.NOT_CLAIMED)] * 20
    assert all(len(line) <= 80 for line in printed(report, 80))
    assert len([line for line in printed(report, 80) if "rule-" in line]) == 40
    assert len(printed(report, 80)) == 42, "a title, the names of the columns, a line each"
    report.results = [result(Verdict.FAILED, long)]
    assert "by far" in " ".join(printed(report, 80)), "what is wrong is never cut"
    assert "It holds." in " ".join(printed(report, 160))


def test_the_page_lists_the_rules_of_the_code() -> None:
    assert PAGE.read_text().endswith(conformance.markdown())


def test_rules_have_unique_names_and_descriptions() -> None:
    rules = select()
    assert len({rule.name for rule in rules}) == len(rules) > 70
    assert all(rule.proves.endswith(".") and rule.clause for rule in rules)
    assert [rule.name for rule in rules if rule.disturbs] == [rules[-1].name]


def test_rules_are_selected_in_the_order_of_a_run() -> None:
    assert [rule.name for rule in select(["drain", "info", "cancel"])] == ["info", "cancel", "drain"]
    with pytest.raises(SluiceError, match="no rule nonsense"):
        select(["nonsense", "info"])


def result(verdict: Verdict, seen: str) -> Result:
    async def check(_: object) -> str:
        return seen

    return Result(Rule(f"rule-{verdict.name.lower()}", "It holds.", "somewhere.proto", check), verdict, seen, 0.25)


def test_a_report_becomes_junit(tmp_path: Path) -> None:
    report = Report("127.0.0.1:1", "mock 1")
    report.results = [
        result(Verdict.PASSED, "fine"),
        result(Verdict.FAILED, "a <b> & \x00 \x1b[31m \udcff"),
        result(Verdict.NOT_CLAIMED, "refused"),
        result(Verdict.NOT_CHECKED, "no router"),
    ]
    junit.write(report, tmp_path / "report.xml")
    suite = ElementTree.parse(tmp_path / "report.xml").getroot()[0]
    assert {name: suite.attrib[name] for name in ("tests", "failures", "skipped", "errors")} == {
        "tests": "4",
        "failures": "1",
        "skipped": "2",
        "errors": "0",
    }
    failure = suite.find("testcase[@name='rule-failed']/failure")
    assert failure is not None
    assert failure.attrib["message"].startswith("a <b> & ")
    assert "somewhere.proto" in (failure.text or "")
    skipped = [case.attrib["message"] for case in suite.iter("skipped")]
    assert skipped == ["not claimed: refused", "not checked: no router"]
    assert report.failed == ["rule-failed"]
