"""Every broken implementation is rejected by the rule that it breaks, and the failure says how."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import hypothesis
import pytest
from hypothesis.stateful import run_state_machine_as_test

sys.path.insert(0, str(Path(__file__).parent))
import mutants  # the module beside this file

from batchjob_testkit.history import rule_of
from batchjob_testkit.queues import SpecQueue
from batchjob_testkit.stateful import lockstep

DOCUMENT = Path(__file__).parents[3] / "docs" / "reference" / "contracts.md"


@pytest.fixture(scope="module")
def failures(tmp_path_factory):
    """How the test that must reject a mutant fails, by mutant."""
    folder = tmp_path_factory.mktemp("mutants")
    tests = [f"{mutants.__file__}::Test{name}::{m.rejected_by}" for name, m in mutants.MUTANTS.items()]
    options = ["--junitxml=report.xml", "--tb=short", "--import-mode=importlib", "--rootdir=."]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTEST_ADDOPTS": ""}
    command = [sys.executable, "-m", "pytest", *options, "-p", "no:cacheprovider", *tests]
    subprocess.run(command, cwd=folder, env=environment, capture_output=True, check=False)
    cases = ET.parse(folder / "report.xml").iter("testcase")
    return {case.get("classname").rpartition(".Test")[2]: f.text for case in cases for f in case}


@pytest.mark.parametrize("name", mutants.MUTANTS)
def test_a_mutant_is_rejected_by_the_rule_that_it_breaks(failures, name):
    text = failures[name]
    rule = rule_of(mutants.MUTANTS[name].rejected_by)
    assert f"AssertionError: {rule}\n" in text, text
    for line in ("observed: .+", "expected: .+", "after:", r"1\. a new "):
        assert re.search(rf"^E +{line}", text, re.MULTILINE), text


def test_lockstep_finds_a_short_history_and_says_the_rule_and_both_sides():
    class Undercounts(SpecQueue):
        """Broken in a way that shows in one way, so that the search finds the same wherever it begins."""

        def __len__(self):
            return max(0, super().__len__() - 1)

    def make(engine, settings, policy):
        return Undercounts(engine, settings, priority_policy=policy)

    search = hypothesis.settings(
        max_examples=50,
        stateful_step_count=6,
        deadline=None,
        derandomize=True,
        database=None,
        report_multiple_bugs=False,
        phases=(hypothesis.Phase.generate, hypothesis.Phase.shrink),
    )
    with pytest.raises(AssertionError) as error:
        run_state_machine_as_test(lockstep(make), settings=search)
    said, _, after = str(error.value).partition("\n  after:\n")
    assert said.splitlines()[:3] == ["Q4: len counts all that wait", "  observed: 0", "  expected: 1"]
    assert [event.split()[1] for event in after.splitlines()] == ["a", "r0#job_name[news]#"], after


def test_the_documented_failure_is_what_is_printed(failures):
    mutant = "OrderFlipsAtTheThreshold"
    printed = re.sub(r"^E +", "", failures[mutant], flags=re.MULTILINE)
    (documented,) = re.findall(r"```text\n(O4: .*?)\n```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    assert " ".join(documented.split()) in " ".join(printed.split())
