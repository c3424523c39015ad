"""Writes a report as JUnit XML for CI systems."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

from sluice.conformance.rule import Report, Result, Verdict

SUITE = "sluice.conformance"


def write(report: Report, path: Path) -> None:
    """Writes a report; rules not claimed or not checked become skipped tests. Raises OSError."""
    skipped = [*report.with_verdict(Verdict.NOT_CLAIMED), *report.with_verdict(Verdict.NOT_CHECKED)]
    suite = ElementTree.Element(
        "testsuite",
        name=SUITE,
        tests=str(len(report.results)),
        failures=str(len(report.failed)),
        errors="0",
        skipped=str(len(skipped)),
        time=f"{sum(result.seconds for result in report.results):.3f}",
    )
    properties = ElementTree.SubElement(suite, "properties")
    for name, value in (("address", report.address), ("engine", report.worker)):
        ElementTree.SubElement(properties, "property", name=name, value=_printable(value))
    suite.extend(_case(result) for result in report.results)
    root = ElementTree.Element("testsuites")
    root.append(suite)
    ElementTree.indent(root)
    ElementTree.ElementTree(root).write(path, encoding="utf-8", xml_declaration=True)


def _case(result: Result) -> ElementTree.Element:
    case = ElementTree.Element("testcase", classname=SUITE, name=result.rule.name, time=f"{max(result.seconds, 0):.3f}")
    if result.verdict is Verdict.FAILED:
        failure = ElementTree.SubElement(case, "failure", message=_printable(result.seen))
        failure.text = _printable(f"{result.rule.proves}\n{result.rule.clause}")
    elif result.verdict is Verdict.PASSED:
        ElementTree.SubElement(case, "system-out").text = _printable(result.seen)
    else:
        ElementTree.SubElement(case, "skipped", message=_printable(f"{result.verdict}: {result.seen}"))
    return case


def _printable(text: str) -> str:
    """Replaces control characters, which XML does not permit."""
    return "".join(char if char.isprintable() or char == "\n" else "�" for char in text)
