"""The command ``batchjob doctor``."""

from __future__ import annotations

import json

import pytest

from batchjob_scheduler.cli import doctor, main

ON = json.dumps({"scheduler_config": {"batch_job_sched_config": {"enabled": True, "max_jobs": 7}}})


@pytest.fixture
def diagnose(monkeypatch, capsys):
    """Runs the command where vLLM and our plug-in are installed, or where they are not."""

    def run(*arguments, vllm="0.32.0", plugins=("batchjob", "lora_resolver"), allowed=None):
        installed = {"vllm": [f"vllm-{vllm}"]} if vllm else {}
        monkeypatch.setattr(doctor, "packages_distributions", lambda: installed)
        monkeypatch.setattr(doctor, "version", lambda name: name.removeprefix("vllm-"))
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
    return [line for line in printed.splitlines() if line.startswith("PROBLEM")]


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
    assert "vLLM ignores batch_job_sched_config" in problem


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
    ],
)
def test_arguments_that_do_not_switch_it_on_are_a_problem(diagnose, arguments, problem):
    status, printed = diagnose(*arguments)
    assert status == 1
    (line,) = problems(printed)
    assert line.startswith(problem)


def test_the_class_alone_switches_it_on(diagnose):
    name = "batchjob_scheduler.scheduler.BatchJobAwareScheduler"
    status, printed = diagnose("--scheduler-cls", name)
    assert status == 0
    assert "scheduler: on: max_jobs=20" in printed
