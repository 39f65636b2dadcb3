"""The outcome of a check as Markdown, JUnit XML and JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any
from xml.etree import ElementTree

from shardwright.batch.ci_verdicts import FaultKind, Result, exit_code
from shardwright.reports.numbers import quantity

_FAULT_WORDS: dict[FaultKind, str] = {
    "not-planned": "cannot be planned",
    "does-not-fit": "does not fit",
    "over-budget": "over budget",
    "slower": "slower than the lock",
    "state-resharded": "saved state resharded",
    "not-locked": "not in the lock",
}


def verdict(result: Result) -> str:
    """What became of a job in a few words."""
    if result.passed:
        return "passed"
    return ", ".join(dict.fromkeys(_FAULT_WORDS[fault.kind] for fault in result.faults))


def change_text(result: Result) -> str:
    """The step time beside the locked one: "+2.1 %", "=" or ""."""
    if result.entry is None or result.locked is None or not result.locked.step_time_s:
        return ""
    change = result.entry.step_time_s / result.locked.step_time_s - 1
    return "=" if change == 0 else f"{100 * change:+.1f} %"


def memory_text(result: Result) -> str:
    """Part of a device's memory at its fullest moment: "45 %"."""
    if result.entry is None:
        return ""
    return f"{100 * result.entry.peak_memory_bytes / result.entry.memory_capacity_bytes:.0f} %"


def summary_text(results: Sequence[Result]) -> str:
    """One line: how many jobs passed, and how many were taken from the lock."""
    passed = sum(result.passed for result in results)
    locked = sum(result.source == "lock" for result in results)
    return f"{passed} of {len(results)} passed; {locked} unchanged since the lock"


def as_json(results: Sequence[Result]) -> str:
    """Everything, for programs."""
    data: dict[str, Any] = {
        "passed": exit_code(results) == 0,
        "exit_code": exit_code(results),
        "results": [
            {"passed": result.passed, **result.model_dump(mode="json")} for result in results
        ],
    }
    return json.dumps(data, indent=1)


def as_markdown(results: Sequence[Result]) -> str:
    """For the summary of a job, as GitHub and GitLab show it."""
    lines = [
        f"### Sharding plans: {summary_text(results)}",
        "",
        "| | job | slice | step | beside the lock | exposed | memory | MFU |",
        "|---|---|---|--:|--:|--:|--:|--:|",
    ]
    for result in results:
        cells = ["✅" if result.passed else "❌", f"`{result.job}`", f"`{result.topology}`"]
        entry = result.entry
        if entry is None:
            cells += [verdict(result), "", "", "", ""]
        else:
            cells += [
                quantity(entry.step_time_s, "s"),
                change_text(result),
                quantity(entry.exposed_collective_time_s, "s"),
                memory_text(result),
                f"{100 * entry.mfu:.1f} %",
            ]
        lines.append(f"| {' | '.join(cells)} |")
    for result in results:
        told = [fault.message for fault in result.faults] + result.notes
        if told:
            lines += ["", f"**`{result.job}` on `{result.topology}`**: {verdict(result)}", ""]
            lines += [f"- {_escaped(message)}" for message in told]
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    """Text in which Markdown changes nothing: paths have brackets and underscores."""
    return "".join(f"\\{c}" if c in "\\`*_[]<>|" else c for c in text)


def as_junit(results: Sequence[Result]) -> str:
    """JUnit XML: a test case for each job and slice, with a failure for each fault."""
    seconds = sum(result.seconds for result in results)
    broken = [r for r in results if any(f.kind == "not-planned" for f in r.faults)]
    failing = [r for r in results if not r.passed and r not in broken]
    counts = {
        "tests": str(len(results)),
        "failures": str(len(failing)),
        "errors": str(len(broken)),
        "time": f"{seconds:.3f}",
    }
    suites = ElementTree.Element("testsuites", counts)
    suite = ElementTree.SubElement(suites, "testsuite", {"name": "shardwright", **counts})
    for result in results:
        case = ElementTree.SubElement(
            suite,
            "testcase",
            {
                "classname": f"shardwright.{result.job}",
                "name": result.topology,
                "time": f"{result.seconds:.3f}",
            },
        )
        if result.faults:
            kind = "error" if result in broken else "failure"
            fault = ElementTree.SubElement(
                case,
                kind,
                {"type": result.faults[0].kind, "message": _legal(result.faults[0].message)},
            )
            fault.text = _legal("\n".join(f"{f.kind}: {f.message}" for f in result.faults))
        if result.notes:
            ElementTree.SubElement(case, "system-out").text = _legal("\n".join(result.notes))
    ElementTree.indent(suites)
    written: bytes = ElementTree.tostring(suites, encoding="utf-8", xml_declaration=True)
    return written.decode() + "\n"


def _legal(text: str) -> str:
    """Text without the characters that XML cannot hold."""
    return "".join(c for c in text if c in "\t\n\r" or (ord(c) >= 32 and ord(c) < 0xFFFE))
