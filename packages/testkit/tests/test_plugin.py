"""The pytest plug-in, as a project that installs the testkit meets it."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

SUITE = """
import pytest
from batchjob_testkit.contracts import EstimatorContract
from batchjob_testkit.estimators import SpecEstimator

seen = []

class Watched(SpecEstimator):
    def observe(self, tokens):
        seen.append(tokens)
        super().observe(tokens)

class TestMine(EstimatorContract):
    @pytest.fixture
    def make_estimator(self):
        return Watched

def test_show():
    print("seen", hash(tuple(seen)))
"""


@pytest.fixture
def run_pytest(tmp_path):
    """Runs pytest with nothing but the plug-in in a folder with one contract test."""
    (tmp_path / "test_mine.py").write_text(SUITE, encoding="utf-8")
    (tmp_path / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    plugins = ("-p", "no:batchjob_testkit", "-p", "batchjob_testkit.plugin", "-p", "no:cacheprovider")

    def run(*arguments, **environment):
        path = os.pathsep.join(filter(None, sys.path))
        return subprocess.run(
            [sys.executable, "-m", "pytest", *plugins, *arguments],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": path, "CI": "", **environment},
            capture_output=True,
            text=True,
            check=False,
        )

    return run


def test_importing_the_plugin_imports_nothing_heavy():
    heavy = ("hypothesis", "batchjob_spec", "batchjob_testkit.contracts")
    code = f"import sys, batchjob_testkit.plugin; print([m for m in {heavy} if m in sys.modules])"
    path = os.pathsep.join(filter(None, sys.path))
    command = [sys.executable, "-c", code]
    result = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


def test_the_header_names_the_rules_and_what_is_under_test(run_pytest):
    output = run_pytest("--collect-only").stdout
    assert re.search(r"^batchjob: rules of batchjob-spec \S+$", output, re.MULTILINE)
    assert "batchjob: test_mine.TestMine (EstimatorContract)" in output


@pytest.mark.parametrize(
    ("module", "contract"),
    [("kv_contracts", "KVManagerContract"), ("scheduler_contracts", "SchedulerContract")],
)
def test_the_header_names_the_contracts_of_the_other_modules(run_pytest, tmp_path, module, contract):
    suite = f"from batchjob_testkit.{module} import {contract}\nclass TestOther({contract}): pass\n"
    (tmp_path / "test_other.py").write_text(suite, encoding="utf-8")
    output = run_pytest("--collect-only", "test_other.py").stdout
    assert f"batchjob: test_other.TestOther ({contract})" in output


def test_a_seed_leads_to_the_same_search_again(run_pytest):
    def search(seed):
        output = run_pytest(f"--batchjob-seed={seed}", "-s").stdout
        assert f", seed {seed}\n" in output
        return re.search(r"seen -?\d+", output)[0]

    assert search(1) == search(1) != search(2)


def test_the_derandomised_profile_searches_the_same_each_time(run_pytest):
    first, second = (
        re.search(r"seen -?\d+", run_pytest("-s", BATCHJOB_PROFILE="ci").stdout) for _ in range(2)
    )
    assert first[0] == second[0]


@pytest.mark.parametrize(
    ("arguments", "environment"),
    [(["--hypothesis-profile=nightly"], {}), ([], {"BATCHJOB_PROFILE": "nightly"})],
)
def test_the_nightly_profile_is_there_when_it_is_named(run_pytest, tmp_path, arguments, environment):
    check = (
        "def test_it():\n    from hypothesis import settings\n    assert settings().max_examples == 1000\n"
    )
    (tmp_path / "test_profile.py").write_text(check, encoding="utf-8")
    result = run_pytest("test_profile.py", *arguments, **environment)
    assert result.returncode == 0, result.stdout


def test_a_nightly_profile_of_the_project_is_kept(run_pytest, tmp_path):
    own = "from hypothesis import settings\nsettings.register_profile('nightly', max_examples=7)\n"
    (tmp_path / "conftest.py").write_text(own, encoding="utf-8")
    check = "def test_it():\n    from hypothesis import settings\n    assert settings().max_examples == 7\n"
    (tmp_path / "test_profile.py").write_text(check, encoding="utf-8")
    assert run_pytest("test_profile.py", BATCHJOB_PROFILE="nightly").returncode == 0


def test_an_unknown_profile_is_refused_with_what_is_allowed(run_pytest):
    refused = run_pytest(BATCHJOB_PROFILE="nightlyy")
    assert refused.returncode == pytest.ExitCode.USAGE_ERROR
    assert "BATCHJOB_PROFILE: got 'nightlyy', allowed: default, ci, nightly" in refused.stderr
