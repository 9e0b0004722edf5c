"""The command ``batchjob doctor``."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from batchjob_scheduler import compat
from batchjob_scheduler.cli import doctor, main

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "when-it-does-not-start.md"
DOCUMENTED = [
    ".*".join(map(re.escape, quoted.split("…")))
    for quoted in re.findall(r"`([^`\n]+: [^`\n]+)`", PAGE.read_text(encoding="utf-8"))
]

SYNC = "batchjob_scheduler.scheduler.BatchJobAwareScheduler"
ON = json.dumps({"scheduler_config": {"batch_job_sched_config": {"enabled": True, "max_jobs": 7}}})


@pytest.fixture
def diagnose(monkeypatch, capsys):
    """Runs the command where vLLM and our plug-in are installed, or where they are not."""

    def run(
        *arguments,
        vllm="0.32.0",
        lacks=(),
        ascend=None,
        plugins=("batchjob", "lora_resolver"),
        allowed=None,
    ):
        versions = {"vllm": vllm, "vllm_ascend": ascend}
        installed = {name: [f"{name}-{version}"] for name, version in versions.items() if version}
        monkeypatch.setattr(doctor, "packages_distributions", lambda: installed)
        monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__=vllm))
        monkeypatch.setattr(compat, "NAMES", {f"vllm:{name}": () for name in lacks})
        monkeypatch.setattr(doctor, "version", lambda name: name.rpartition("-")[2])
        points = [type("EntryPoint", (), {"name": name}) for name in plugins]
        monkeypatch.setattr(doctor, "entry_points", lambda **_: points)
        if allowed is None:
            monkeypatch.delenv("VLLM_PLUGINS", raising=False)
        else:
            monkeypatch.setenv("VLLM_PLUGINS", allowed)
        status = main(["doctor", *arguments])
        return status, capsys.readouterr().out

    return run


def problems(printed):
    """The lines that tell of one; each is on the page, whose ``…`` stands for what differs."""
    found = [line for line in printed.splitlines() if line.startswith("PROBLEM")]
    for line in found:
        assert any(re.search(pattern, line) for pattern in DOCUMENTED), line
    return found


def test_nothing_is_wrong(diagnose):
    status, printed = diagnose("--additional-config", ON)
    assert (status, problems(printed)) == (0, [])
    assert "0.32.0" in printed
    assert "scheduler: on: max_jobs=7" in printed


@pytest.mark.parametrize("allowed", ["", "ascend,lora_resolver", "batch"])
def test_a_filter_that_leaves_the_plugin_out_is_a_problem(diagnose, allowed):
    status, printed = diagnose(allowed=allowed)
    assert status == 1
    (problem,) = problems(printed)
    assert problem.startswith(f"PROBLEM VLLM_PLUGINS: {allowed!r} leaves batchjob out")
    assert "nothing of ours reads batch_job_sched_config" in problem


@pytest.mark.parametrize("surroundings", [{"allowed": "ascend"}, {"plugins": ()}])
def test_the_section_alone_switches_nothing_on_without_the_plugin(diagnose, surroundings):
    status, printed = diagnose("--additional-config", ON, **surroundings)
    assert status == 1
    assert problems(printed)[-1] == "PROBLEM scheduler: off, since the plug-in is not loaded"
    assert "scheduler: on" not in printed


@pytest.mark.parametrize("surroundings", [{"allowed": "ascend"}, {"plugins": ()}])
@pytest.mark.parametrize("additional_config", ["{}", ON])
def test_the_class_by_its_name_is_on_without_the_plugin(diagnose, surroundings, additional_config):
    arguments = ("--scheduler-cls", SYNC, "--additional-config", additional_config)
    status, printed = diagnose(*arguments, **surroundings)
    assert (status, problems(printed)) == (0, [])
    assert "scheduler: on" in printed
    if "allowed" in surroundings:
        assert "VLLM_PLUGINS: VLLM_PLUGINS='ascend' leaves batchjob out: the scheduler is on by" in printed


def test_without_the_plugin_vllm_ascend_takes_the_section_for_its_own(diagnose):
    surroundings = {"allowed": "ascend", "ascend": "0.30.0rc2"}
    arguments = ("--scheduler-cls", SYNC, "--additional-config", ON)
    status, printed = diagnose(*arguments, **surroundings)
    problem = "PROBLEM scheduler: off, since vllm-ascend takes batch_job_sched_config for its own"
    assert (status, problems(printed)) == (1, [problem])
    assert diagnose("--scheduler-cls", SYNC, **surroundings)[0] == 0


@pytest.mark.parametrize(
    ("surroundings", "lack"),
    [
        ({"vllm": "0.22.1"}, "which is too old"),
        ({"lacks": ["Gone", "Moved"]}, "which lacks vllm.Gone, vllm.Moved"),
    ],
)
def test_an_unsupported_vllm_is_told_in_the_words_in_which_the_start_would_end(diagnose, surroundings, lack):
    status, printed = diagnose(**surroundings)
    with pytest.raises(compat.UnsupportedEngineError, match=lack) as raised:
        compat.check_engine()
    assert (status, problems(printed)) == (1, [f"PROBLEM vLLM: {raised.value}"])


def test_a_vllm_that_was_not_tested_is_told_and_is_no_problem(diagnose):
    status, printed = diagnose(vllm="99.0.0")
    assert (status, problems(printed)) == (0, [])
    assert "vLLM: vLLM 99.0.0 was not tested" in printed


def test_a_vllm_that_cannot_be_imported_is_a_problem(diagnose, monkeypatch):
    class Broken(ModuleType):
        def __getattr__(self, name):
            raise OSError("libcudart.so.13: cannot open shared object file")

    def import_module(name):
        return Broken(name)

    monkeypatch.setattr(compat, "import_module", import_module)
    status, printed = diagnose()
    (problem,) = problems(printed)
    assert status == 1
    assert problem.startswith("PROBLEM vLLM: ")
    assert problem.endswith("0.32.0 cannot be imported: libcudart.so.13: cannot open shared object file")


def test_a_filter_that_names_the_plugin_is_none(diagnose):
    status, printed = diagnose(allowed="ascend,batchjob")
    assert (status, problems(printed)) == (0, [])


@pytest.mark.parametrize(
    ("surroundings", "problem"),
    [
        ({"vllm": None}, "PROBLEM vLLM: not installed in this environment"),
        ({"plugins": ()}, "PROBLEM plug-in: batchjob is not one of none in vllm.general_plugins"),
    ],
)
def test_what_is_not_installed_is_a_problem(diagnose, surroundings, problem):
    status, printed = diagnose(**surroundings)
    assert (status, problems(printed)) == (1, [problem])


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--additional-config", "{enabled}"], "PROBLEM --additional-config: is not JSON"),
        (
            ["--additional-config", "{}"],
            "PROBLEM scheduler: off, since batch_job_sched_config.enabled is not",
        ),
        (
            ["--additional-config", '{"batch_job_sched_config": {"enabled": 1}}'],
            "PROBLEM scheduler: batch_job_",
        ),
        (
            ["--additional-config", ON, "--scheduler-cls", "some.Other"],
            "PROBLEM scheduler: --scheduler-cls: got",
        ),
        (
            ["--scheduler-cls", "batchjob_scheduler.BatchJobAwareScheduler"],
            "PROBLEM scheduler: --scheduler-cls: got 'batchjob_scheduler.BatchJobAwareScheduler', allowed",
        ),
    ],
)
def test_arguments_that_do_not_switch_it_on_are_a_problem(diagnose, arguments, problem):
    status, printed = diagnose(*arguments)
    assert status == 1
    (line,) = problems(printed)
    assert line.startswith(problem)


def test_the_class_alone_switches_it_on(diagnose):
    status, printed = diagnose("--scheduler-cls", SYNC)
    assert status == 0
    assert "scheduler: on: max_jobs=20" in printed


class Derived(type("BatchJobAwareScheduler", (), {"__module__": "batchjob_scheduler.scheduler"})):
    """As a user would derive from our class, which only vLLM lets import."""


def test_a_class_that_derives_from_ours_switches_it_on(diagnose):
    status, printed = diagnose("--scheduler-cls", f"{__name__}.Derived", allowed="ascend")
    assert (status, problems(printed)) == (0, [])
    assert "scheduler: on: max_jobs=20" in printed
