"""The simulator's two engines agree, and its clock and its refusals work with vLLM's real scheduler."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from vllm.v1.core.sched.scheduler import Scheduler

from batchjob_testkit.engines import EngineLimits
from batchjob_testkit.simulator.command import main
from batchjob_testkit.simulator.fake_backend import FakeBackend
from batchjob_testkit.simulator.mixes import MIXES
from batchjob_testkit.simulator.profiles import PROFILES
from batchjob_testkit.simulator.scenario import Scenario, longest_request_urgent
from batchjob_testkit.simulator.simulation import simulate
from batchjob_testkit.simulator.vllm_backend import SchedulerClassError, VllmBackend, scheduler_class
from batchjob_testkit.workloads import Workload, WorkloadRequest

pytestmark = pytest.mark.vllm

H100 = PROFILES["h100"]


def starved(name, requests=40, **limits):
    """A mix on an engine with few blocks, so that it preempts."""
    batch = MIXES[name].scenario(name, H100, requests=requests, seed=3)
    return replace(batch, limits=replace(batch.limits, num_blocks=801, max_num_seqs=16, **limits))


def without_cpu_time(results):
    return {timing: replace(result, scheduler_seconds=0.0) for timing, result in results.items()}


@pytest.mark.parametrize("name", ["sharegpt", "24-jobs", "capped", "four-jobs-trickling"])
def test_both_engines_agree_on_a_run(name):
    batch = starved(name)
    fake, real = (
        simulate(backend, batch, H100, keep_moments=True) for backend in (FakeBackend(), VllmBackend())
    )
    assert without_cpu_time(fake) == without_cpu_time(real)
    for timing, result in fake.items():
        assert result.moments == real[timing].moments


def test_the_batch_that_both_agree_on_preempts():
    assert simulate(FakeBackend(), starved("sharegpt"), H100)["serial"].preemptions > 0


def test_both_engines_agree_on_priorities():
    batch = longest_request_urgent(starved("sharegpt", policy="priority"))
    fake, real = (
        simulate(backend, batch, H100) for backend in (FakeBackend(), VllmBackend(policy="priority"))
    )
    assert without_cpu_time(fake) == without_cpu_time(real)


def test_the_prefix_cache_computes_a_template_once():
    requests = tuple(WorkloadRequest("news", 40, 2, prefix_tokens=32) for _ in range(3))
    limits = EngineLimits(max_num_seqs=1, max_model_len=64)
    batch = Scenario(
        name="templates", workload=Workload(64, requests), limits=limits, enable_prefix_caching=True
    )
    result = simulate(VllmBackend(), batch, H100)["serial"]
    assert result.scheduled_tokens == 32 + 3 * (8 + 1)
    assert result.recomputed_tokens == 0
    assert result.makespan_seconds >= result.bound_seconds


def test_options_reach_the_scheduler():
    batch = starved("sharegpt", requests=4)
    backend = VllmBackend(scheduler_config={"scheduler_reserve_full_isl": False}, max_num_batched_tokens=512)
    scheduler = backend(batch)._scheduler
    assert not scheduler.scheduler_config.scheduler_reserve_full_isl
    assert scheduler.max_num_scheduled_tokens == 512


def test_async_scheduling_computes_at_most_a_token_more_for_each_request():
    batch = MIXES["24-jobs"].scenario("24-jobs", H100, requests=40, seed=3)
    name = "vllm.v1.core.sched.async_scheduler.AsyncScheduler"
    result = simulate(VllmBackend(scheduler=name, async_scheduling=True), batch, H100)["serial"]
    plain = simulate(VllmBackend(), batch, H100)["serial"]
    assert result.preemptions == plain.preemptions == 0
    wasted = result.scheduled_tokens - plain.scheduled_tokens
    assert 0 < wasted <= len(batch.requests)
    assert result.makespan_seconds >= plain.makespan_seconds


SEEN = []


class ClockedScheduler(Scheduler):
    """Notes the time at each step."""

    clock = None

    def schedule(self, *args, **kwargs):
        SEEN.append(self.clock())
        return super().schedule(*args, **kwargs)


def test_a_scheduler_that_reads_a_clock_reads_the_virtual_one_and_runs_once_per_timing():
    batch = starved("sharegpt", requests=3)
    backend = VllmBackend(scheduler=f"{__name__}:ClockedScheduler")
    SEEN.clear()
    results = simulate(backend, batch, H100, keep_moments=True)
    starts = [position for position, seconds in enumerate(SEEN) if seconds == 0.0]
    assert len(starts) == 2
    for result, start in zip(results.values(), starts, strict=True):
        ends = [moment.seconds for moment in result.moments]
        assert SEEN[start + 1 : start + len(ends)] == ends[:-1]


def test_the_command_compares_a_scheduler_with_the_default(tmp_path, capsys):
    file = tmp_path / "lengths.csv"
    file.write_text("job,prompt_tokens,output_tokens\n" + "news,100,20\nchat,50,90\n" * 10)
    ours = "batchjob_scheduler.scheduler.BatchJobAwareScheduler"
    config = '{"batch_job_sched_config": {"enabled": true}}'
    main([str(file), "--kv-cache-tokens", "640", "--scheduler", ours, "--additional-config", config])
    printed = capsys.readouterr().out
    assert printed.count("engine's default  BatchJobAwareScheduler") == 2
    assert len(re.findall(r"^against the default +\+0.0 % +[+-]\d+.\d %$", printed, re.MULTILINE)) == 2


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module.Scheduler", "got 'no_such_module.Scheduler', which cannot be imported"),
        ("vllm.v1.core.sched.scheduler.NoSuch", "which cannot be imported"),
        ("not a name", "got 'not a name', which cannot be imported"),
        ("json.dumps", "got 'json.dumps', which is <function dumps .*allowed: a subclass of"),
        ("collections.OrderedDict", "allowed: a subclass of vLLM's SchedulerInterface"),
    ],
)
def test_what_is_no_scheduler_is_refused_in_one_line(name, message):
    with pytest.raises(SchedulerClassError, match=message) as error:
        scheduler_class(name)
    assert len(str(error.value).splitlines()) == 1
