"""Batches through the real engine on CPU, on a tiny model, as a user runs them."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from batchjob_scheduler.report import Report
from batchjob_testkit.tiny_model import make_tiny_model

pytestmark = pytest.mark.engine

HERE = Path(__file__).parent
SECONDS = 600

# No model hub is asked, no statistics are sent, and the KV cache has a size in GiB instead of a share
# of the memory that happens to be free.
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}

ON = {"scheduler_config": {"batch_job_sched_config": {"enabled": True}}}
# A KV cache of 39 blocks of 32 tokens for 16 requests at once: far too little.
STARVED = (
    *("--num-gpu-blocks-override", "40", "--block-size", "32", "--max-num-seqs", "16"),
    *("--max-model-len", "1024", "--enforce-eager", "--dtype", "float32"),
)


@dataclass
class Run:
    """What a run of ``run_batch`` left behind."""

    log: str
    lines: list[dict]
    report: Report | None
    preemptions: int

    @property
    def texts(self):
        """The answers of each request by ``custom_id``."""
        return {
            line["custom_id"]: [c["message"]["content"] for c in line["response"]["body"]["choices"]]
            for line in self.lines
            if line["error"] is None
        }


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def run_batch(model, tmp_path_factory):
    """Runs ``python -m vllm.entrypoints.openai.run_batch`` on requests, with more arguments."""

    def run(requests, *arguments, check=True):
        folder = tmp_path_factory.mktemp("batch")
        source, output = folder / "input.jsonl", folder / "output.jsonl"
        report, preemptions = folder / "report.json", folder / "preemptions"
        source.write_text(
            "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in requests), encoding="utf-8"
        )
        command = (
            *(sys.executable, "-m", "vllm.entrypoints.openai.run_batch"),
            *("--model", str(model), "-i", str(source), "-o", str(output), *arguments),
        )
        done = subprocess.run(
            command,
            env={
                **os.environ,
                **ENVIRONMENT,
                "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]),
                "BATCHJOB_REPORT": str(report),
                "PREEMPTIONS": str(preemptions),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        if check:
            assert done.returncode == 0, done.stdout
        # Not splitlines, since an answer may hold what ends a line in Unicode alone.
        lines = output.read_text(encoding="utf-8").split("\n")[:-1] if output.exists() else []
        return Run(
            log=done.stdout,
            lines=[json.loads(line) for line in lines],
            report=Report.read(report) if report.exists() else None,
            preemptions=len(preemptions.read_text().splitlines()) if preemptions.exists() else 0,
        )

    return run


def chat(custom_id, content, *, request_id=None, **body):
    body = {"messages": [{"role": "user", "content": content}], "temperature": 0, **body}
    if request_id is not None:
        body["request_id"] = request_id
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}


def starving_batch():
    """64 requests of three jobs with different prompt lengths and caps, in random order."""
    generator = random.Random(7)
    requests = []
    for number in range(64):
        job, prompt, cap = (("news", 200, 40), ("chat", 60, 150), ("labels", 30, 4))[number % 3]
        name = f"#job_name[{job}]#req_{number:03}"
        words = "".join(generator.choices("abcdefgh ", k=generator.randint(prompt // 2, prompt)))
        requests.append(chat(name, words, request_id=name, max_tokens=cap))
    generator.shuffle(requests)
    return requests


@pytest.fixture(scope="session")
def default_run(run_batch):
    scheduler = ("--scheduler-cls", "preemption_counter.CountingScheduler")
    return run_batch(starving_batch(), *STARVED, *scheduler)


@pytest.fixture(scope="session")
def our_run(run_batch):
    return run_batch(starving_batch(), *STARVED, "--additional-config", json.dumps(ON))


def test_vllms_own_scheduler_preempts_on_this_batch(default_run):
    assert default_run.preemptions > 0
    assert default_run.report is None


def test_greedy_texts_are_those_of_vllms_own_scheduler(default_run, our_run):
    assert len(default_run.texts) == 64
    assert our_run.texts == default_run.texts


def test_every_request_is_answered_once(our_run):
    answered = sorted(line["custom_id"] for line in our_run.lines)
    assert answered == sorted(line["custom_id"] for line in starving_batch())


def test_a_line_at_the_start_says_that_it_is_on_with_the_settings(our_run):
    (line,) = [line for line in our_run.log.splitlines() if "scheduler is on" in line]
    assert "BatchJobAwareScheduler" in line
    assert "max_jobs=20, reserve_margin_blocks=2, reserve_max_blocks=8" in line


def test_the_report_says_what_each_job_did(our_run):
    jobs = {job.job: job for job in our_run.report.jobs}
    assert {name: job.requests for name, job in jobs.items()} == {"news": 22, "chat": 21, "labels": 21}
    assert all(job.finished == job.observed == job.requests for job in jobs.values())
    assert jobs["labels"].observed_tokens <= 4
    assert jobs["labels"].predicted_tokens < jobs["chat"].predicted_tokens


def test_an_asynchronous_class_of_a_users_own_gives_the_same_texts(run_batch, default_run):
    """By its name, since vLLM has no async scheduling on CPU, for which the synchronous one is right."""
    scheduler = ("--scheduler-cls", "derived_schedulers.AsyncOfAUser")
    run = run_batch(starving_batch(), *STARVED, *scheduler)
    assert run.texts == default_run.texts
    assert "scheduler is on (AsyncOfAUser)" in run.log
    assert run.log.count("async scheduling is off, and AsyncOfAUser is not for that") == 1


def test_requests_with_seeds_end_no_engine_on_a_cpu(run_batch):
    """There vLLM's own runner dies when it computes a part of such a prompt, as a shaped step may ask."""
    requests = [
        {**line, "body": {**line["body"], "seed": 7, "temperature": 1.0}} for line in starving_batch()
    ]
    room = ("--max-num-batched-tokens", "8192")  # so that vLLM cuts none by itself
    run = run_batch(requests, *STARVED, *room, "--additional-config", json.dumps(ON))
    assert len(run.texts) == 64
    assert run.log.count("has a seed: steps are not shaped from here on") == 1


def test_odd_requests_are_answered_and_a_giant_one_is_refused_with_the_numbers(run_batch):
    """In one run, since an engine takes long to start: the older place of the section, too."""
    names = {
        "broken": "#job_name[broken#1",
        "nested": "#job_name[a[b]]#1",
        "empty": "#job_name[]#1",
        "very long": f"#job_name[{'x' * 3000}]#1",
        "non-ASCII": "#job_name[新闻]#1",
        "two tags": "#job_name[first]##job_name[second]#1",
    }
    requests = [chat(key, "Hello", request_id=name, max_tokens=5) for key, name in names.items()]
    requests += [
        chat("no ID", "Hello", max_tokens=5),
        chat("two choices", "Hello", request_id="#job_name[pair]#1", max_tokens=5, n=2, temperature=1),
        chat("by argument", "Hello", vllm_xargs={"job_name": "named"}, max_tokens=5),
        # A byte is a token, and 20 blocks of 32 hold 640.
        chat("outgrows", "x" * 600, max_tokens=100, ignore_eos=True),
        chat("giant", "x" * 700, max_tokens=5),
    ]
    legacy = {"batch_job_sched_config": {"enabled": True, "max_jobs": 3}}
    scheduler = ("--scheduler-cls", "derived_schedulers.SmallPoolScheduler")
    run = run_batch(requests, *STARVED, *scheduler, "--additional-config", json.dumps(legacy))

    assert [line["custom_id"] for line in run.lines] == [line["custom_id"] for line in requests]
    errors = {line["custom_id"]: line["error"]["error"]["message"] for line in run.lines if line["error"]}
    assert errors.keys() == {"giant", "outgrows"}
    assert "needs 22 KV cache blocks for its 701 tokens" in errors["giant"]
    assert "needs 21 KV cache blocks for its 641 tokens" in errors["outgrows"]
    assert all("the whole pool has 20 of 32 tokens" in message for message in errors.values())
    assert len(run.texts["two choices"]) == 2
    assert all(len(texts) == 1 for name, texts in run.texts.items() if name != "two choices")
    assert "max_jobs=3" in run.log


def test_generate_names_jobs_by_extra_arguments(model, tmp_path):
    report = tmp_path / "report.json"
    done = subprocess.run(
        (sys.executable, str(HERE / "offline_llm.py"), str(model)),
        env={**os.environ, **ENVIRONMENT, "BATCHJOB_REPORT": str(report)},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (outputs,) = [line for line in done.stdout.splitlines() if line.startswith("OUTPUTS")]
    assert len(json.loads(outputs.removeprefix("OUTPUTS"))) == 6
    jobs = {job.job: job.requests for job in Report.read(report).jobs}
    assert jobs == {"job 0": 3, "job 1": 3}


@pytest.mark.parametrize(
    ("additional_config", "message"),
    [
        (
            {"scheduler_config": {"batch_job_sched_config": {"enabled": True, "max_jobs": -5}}},
            "batch_job_sched_config.max_jobs: got -5, allowed: an integer of at least 0",
        ),
        (
            {"batch_job_sched_config": {"enabled": True, "max_job": 5}},
            "batch_job_sched_config.max_job: got 5, allowed: the keys enabled, max_jobs",
        ),
    ],
)
def test_a_wrong_configuration_ends_the_start_with_one_message(run_batch, additional_config, message):
    run = run_batch(starving_batch(), "--additional-config", json.dumps(additional_config), check=False)
    assert run.log.count(message) == 1
    assert message in run.log.splitlines()[-1]
    assert run.lines == []
