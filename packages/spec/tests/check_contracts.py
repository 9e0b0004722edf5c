"""Run CrossHair on the contracts of the specification and judge its report.

A scalar rule must be confirmed over all paths. A rule over floats, strings or sequences cannot be, and
is searched for a counterexample for a stated number of seconds per condition.

CrossHair exits with 0 also for contradictory preconditions, misspelt names and files with nothing
to check, so its exit status is not enough. Run as a script; the last line is the verdict.
"""

from __future__ import annotations

import importlib
import inspect
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

MODULES = ("blocks", "estimator", "reservation", "ordering", "jobs")

ONLY_SEARCHED = {
    "estimator.observe",  # floats; its step in whole numbers, estimator.moved, is proved
    "estimator.predicted_tokens",  # floats
    "jobs.tagged_job",  # strings
    "jobs.job_name",
    "jobs.idle_jobs",  # sequences
    "jobs.track",
    "reservation.shared_tokens",
}

SECONDS_TO_PROVE = 20
SECONDS_TO_SEARCH = 3

_LINE = re.compile(r"^(?P<file>.+?):(?P<line>\d+): (?P<kind>\w+): (?P<text>.*)$")


@dataclass
class Verdict:
    """What the report says: ``module.function`` per condition."""

    proved: list[str] = field(default_factory=list)
    searched: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


def judge(report: Iterable[str], functions: dict[str, list[tuple[int, str]]]) -> Verdict:
    """Sort the lines of a report; whatever is not understood is a failure."""
    verdict = Verdict()
    for line in report:
        match = _LINE.match(line)
        if match is None:
            verdict.failures.append(line)
            continue
        name = _function_at(Path(match["file"]).stem, int(match["line"]), functions)
        if match["kind"] == "info" and match["text"].startswith("Confirmed"):
            verdict.proved.append(name)
        elif match["text"].startswith("Not confirmed") and name in ONLY_SEARCHED:
            verdict.searched.append(name)
        else:
            verdict.failures.append(f"{name}: {match['text']}")
    unchecked = _with_contracts(functions) - {*verdict.proved, *verdict.searched}
    failed = {failure.split(":")[0] for failure in verdict.failures}
    verdict.failures += [f"{name}: nothing was checked" for name in sorted(unchecked - failed)]
    return verdict


def functions_of(modules: Iterable[str]) -> dict[str, list[tuple[int, str]]]:
    """The functions of each module with their first lines and docstrings' contracts."""
    found: dict[str, list[tuple[int, str]]] = {}
    for module in modules:
        members = vars(importlib.import_module(f"batchjob_spec.{module}")).values()
        found[module] = sorted(
            (inspect.getsourcelines(member)[1], member.__name__ + _mark(member))
            for member in members
            if inspect.isfunction(member) and member.__module__ == f"batchjob_spec.{module}"
        )
    return found


def _mark(function: object) -> str:
    return "*" if "post:" in (inspect.getdoc(function) or "") else ""


def _with_contracts(functions: dict[str, list[tuple[int, str]]]) -> set[str]:
    return {
        f"{module}.{name.removesuffix('*')}"
        for module, members in functions.items()
        for _, name in members
        if name.endswith("*")
    }


def _function_at(module: str, line: int, functions: dict[str, list[tuple[int, str]]]) -> str:
    before = [name for first, name in functions.get(module, []) if first <= line]
    return f"{module}.{before[-1].removesuffix('*')}" if before else f"{module}:{line}"


def check(functions: Iterable[str], seconds: int) -> list[str]:
    """CrossHair's report on ``module.function`` names, with so many seconds for each condition."""
    command = [
        *(sys.executable, "-m", "crosshair", "check", "--report_all", "--analysis_kind=PEP316"),
        f"--per_condition_timeout={seconds}",
        *(f"batchjob_spec.{function}" for function in sorted(functions)),
    ]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return [line for line in (result.stdout + result.stderr).splitlines() if line.strip()]


def main() -> int:
    """Check, print, and say by the exit status whether all is well."""
    functions = functions_of(MODULES)
    to_prove = _with_contracts(functions) - ONLY_SEARCHED
    report = [*check(to_prove, SECONDS_TO_PROVE), *check(ONLY_SEARCHED, SECONDS_TO_SEARCH)]
    verdict = judge(report, functions)
    for name in sorted({*verdict.proved, *verdict.searched}):
        proved, searched = verdict.proved.count(name), verdict.searched.count(name)
        print(f"{name}: {proved} proved" + f", {searched} searched" * bool(searched))
    for failure in verdict.failures:
        print(f"FAILED {failure}")
    print(
        f"contracts: {len(verdict.proved)} conditions proved, {len(verdict.searched)} searched "
        f"for {SECONDS_TO_SEARCH} s each, {len(verdict.failures)} failed"
    )
    return 0 if verdict.proved and not verdict.failures else 1


if __name__ == "__main__":
    sys.exit(main())
