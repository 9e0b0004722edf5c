"""``nox -s bench-scheduler``: what scheduling itself costs, ours beside vLLM's first come, first served.

Prints the CPU time of a step and of the queue's own calls in it, of adding and of aborting a request, and
the memory of a waiting request; writes docs/benchmarks/scheduling-cost.md. All are measured in turn in one
process, so that ratios can be trusted more than times.
"""

from __future__ import annotations

import argparse
import gc
import logging
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from policies import OURS
from tables import command, machine, markdown
from vllm.v1.core.sched.request_queue import FCFSRequestQueue

from batchjob_scheduler.config import BatchJobConfig
from batchjob_scheduler.queue import BatchJobQueue
from batchjob_testkit.fakes import FakeEngine, FakeRequest
from batchjob_testkit.fakes.request import FakeSamplingParams
from batchjob_testkit.simulator.vllm_backend import VLLM_SCHEDULER, scheduler_class
from batchjob_testkit.vllm_scheduler import EngineOptions, VirtualEngine

OUTPUT = Path(__file__).parent.parent / "docs" / "benchmarks" / "scheduling-cost.md"
RUNNING = 256
WARM_UP_STEPS = 30
STEPS_PER_TURN = 20
ADDED = ABORTED = 1000
ABORT_SECONDS = 1.0


class Stopwatch:
    """Adds up the CPU time that some calls take."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same call, measured."""

        def measured(*args: Any, **kwargs: Any) -> Any:
            start = time.thread_time()
            result = call(*args, **kwargs)
            self.seconds += time.thread_time() - start
            return result

        return measured


class MeasuredQueue:
    """A waiting queue whose own calls are measured."""

    def __init__(self, queue: Any) -> None:
        self._queue = queue
        self._stopwatch = Stopwatch()

    @property
    def seconds(self) -> float:
        """What the calls took so far."""
        return self._stopwatch.seconds

    def __getattr__(self, name: str) -> Any:
        return self._stopwatch.around(getattr(self._queue, name))

    def __bool__(self) -> bool:
        return bool(self._stopwatch.around(bool)(self._queue))

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._queue)


class Subject:
    """An engine with 256 running requests and many that wait; about two end at each step."""

    def __init__(
        self, scheduler: str, waiting: int, jobs: int, blocks: int, *, shuffled: bool = False
    ) -> None:
        options = EngineOptions(
            num_blocks=blocks + 1, max_num_seqs=RUNNING, max_num_batched_tokens=8192, max_model_len=1024
        )
        self._engine = VirtualEngine(scheduler_class(scheduler), options)
        scheduler_under_test = self._engine.scheduler
        self.queue = MeasuredQueue(scheduler_under_test.waiting)
        scheduler_under_test.waiting = self.queue
        self._stopwatch = Stopwatch()
        for name in ("schedule", "update_from_output"):
            measured = self._stopwatch.around(getattr(scheduler_under_test, name))
            setattr(scheduler_under_test, name, measured)
        generator = Random(0)
        for number in range(RUNNING + waiting):
            name = f"#job_name[{number % jobs}]#{number}"
            self._engine.submit(name, 16, generator.randint(16, 240), max_tokens=1000)
        if shuffled:
            requests = [self.queue.pop_request() for _ in range(len(self.queue))]
            generator.shuffle(requests)
            for request in requests:
                self.queue.add_request(request)

    def step(self, steps: int) -> None:
        """Make steps."""
        for _ in range(steps):
            self._engine.step()
        self._engine.steps.clear()

    def measure(self, steps: int) -> tuple[float, float]:
        """The CPU time of a step, in ms, and of the queue's calls in it, in µs."""
        total, queue = self._stopwatch.seconds, self.queue.seconds
        self.step(steps)
        return (
            1e3 * (self._stopwatch.seconds - total) / steps,
            1e6 * (self.queue.seconds - queue) / steps,
        )


def steps_table(cases: list[tuple[int, int, int]], turns: int) -> str:
    """CPU time of a step, with so many waiting requests of so many jobs, and so many blocks."""
    rows = []
    for waiting, jobs, blocks in cases:
        subjects = {
            "FCFS": Subject(VLLM_SCHEDULER, waiting, jobs, blocks),
            "shuffled": Subject(VLLM_SCHEDULER, waiting, jobs, blocks, shuffled=True),
            "ours": Subject(OURS, waiting, jobs, blocks),
        }
        for subject in subjects.values():
            subject.step(WARM_UP_STEPS)
        taken: dict[str, list[tuple[float, float]]] = {name: [] for name in subjects}
        with no_collection():
            for _ in range(turns):
                for name, subject in subjects.items():
                    taken[name].append(subject.measure(STEPS_PER_TURN))
        steps = {name: [step for step, _ in taken[name]] for name in subjects}
        rows.append(
            [
                f"{waiting:,} of {jobs}, {blocks:,}",
                *(f"{median(steps[name]):.2f}" for name in subjects),
                *(spread(ratios(steps["ours"], steps[name]), 2) for name in ("FCFS", "shuffled")),
                *(f"{median(queue for _, queue in taken[name]):.0f}" for name in ("FCFS", "ours")),
            ]
        )
        print(rows[-1], flush=True)
    head = [
        "waiting requests of jobs, blocks",
        *("FCFS ms", "FCFS shuffled ms", "ours ms"),
        *("ours / FCFS", "ours / FCFS shuffled"),
        *("queue FCFS µs", "queue ours µs"),
    ]
    return markdown(head, rows)


@contextmanager
def no_collection() -> Iterator[None]:
    """What is measured within is not charged with the collection of garbage of all the rest."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def ratios(mine: list[float], its: list[float]) -> list[float]:
    """Turn by turn, so that a change of the machine's speed is in both."""
    return [m / i for m, i in zip(mine, its, strict=True)]


def spread(values: list[float], digits: int) -> str:
    """Median, least and most."""
    return f"{median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def queues() -> dict[str, Callable[[], Any]]:
    """The bare waiting queues."""
    return {
        "FCFS": FCFSRequestQueue,
        "ours": lambda: BatchJobQueue(BatchJobConfig(), FakeEngine(usable_blocks=100_000)),
    }


def waiting_requests(count: int, jobs: int) -> list[FakeRequest]:
    """Requests of several jobs with prompts of different lengths."""
    generator, params = Random(0), FakeSamplingParams()
    return [
        FakeRequest(
            f"#job_name[{number % jobs}]#{number}", generator.randint(16, 4000), 1000, sampling_params=params
        )
        for number in range(count)
    ]


def calls_table(waiting_numbers: list[int], jobs: int, turns: int) -> str:
    """What adding and aborting one of so many waiting requests takes, in µs."""
    rows = []
    for waiting in waiting_numbers:
        requests = waiting_requests(waiting + ADDED, jobs)
        taken = [
            spread([operation(make(), requests, waiting) for _ in range(turns)], 1)
            for operation in (microseconds_to_add, microseconds_to_abort)
            for make in queues().values()
        ]
        rows.append([f"{waiting:,}", *taken])
        print(rows[-1], flush=True)
    return markdown(["waiting", "add: FCFS µs", "ours µs", "abort: FCFS µs", "ours µs"], rows)


def microseconds_to_add(queue: Any, requests: list[FakeRequest], waiting: int) -> float:
    """The CPU time of one request more, in the mean over some."""
    for request in requests[:waiting]:
        queue.add_request(request)
    with no_collection():
        start = time.thread_time()
        for request in requests[waiting:]:
            queue.add_request(request)
        return 1e6 * (time.thread_time() - start) / ADDED


def microseconds_to_abort(queue: Any, requests: list[FakeRequest], waiting: int) -> float:
    """The CPU time of taking one request off the queue and telling it the end, in the mean over some."""
    for request in requests[:waiting]:
        queue.add_request(request)
    end = getattr(queue, "end", None)
    gone = Random(1).sample(requests[:waiting], min(ABORTED, waiting // 2))
    with no_collection():
        start = time.thread_time()
        seconds, aborted = 0.0, 0
        while gone and seconds < ABORT_SECONDS:
            request = gone.pop()
            queue.remove_requests({request})
            if end is not None:
                end(request.request_id, by_itself=False)
            seconds, aborted = time.thread_time() - start, aborted + 1
        return 1e6 * seconds / aborted


def memory_table(waiting: int, jobs_numbers: list[int]) -> str:
    """The bytes of a waiting request in the queue, beside the request itself."""
    rows = []
    for jobs in jobs_numbers:
        requests = waiting_requests(waiting, jobs)
        row = [f"{waiting:,} of {jobs}"]
        for make in queues().values():
            queue = make()
            tracemalloc.start()
            for request in requests:
                queue.add_request(request)
            row.append(f"{tracemalloc.get_traced_memory()[0] / waiting:.0f}")
            tracemalloc.stop()
        rows.append(row)
    return markdown(["waiting requests of jobs", "FCFS bytes", "ours bytes"], rows)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--waiting", type=int, nargs="+", default=[1000, 10_000, 100_000])
    parser.add_argument("--jobs", type=int, nargs="+", default=[1, 20, 200])
    parser.add_argument("--blocks", type=int, nargs="+", default=[100_000, 3500])
    parser.add_argument("--turns", type=int, default=15, help="of 20 steps each (default: %(default)s)")
    parser.add_argument("--call-turns", type=int, default=5, help="when adding and aborting")
    parser.add_argument("--most-waiting", type=int, default=1_000_000, help="when adding and aborting")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    arguments = parser.parse_args()
    sizes = [size for size in (1000, 10_000, 100_000, 1_000_000) if size <= arguments.most_waiting]
    text = REPORT.format(
        command=command("bench-scheduler"),
        machine=machine(),
        steps=steps_table(
            list(product(arguments.waiting, arguments.jobs, arguments.blocks)), arguments.turns
        ),
        calls=calls_table(sizes, jobs=20, turns=arguments.call_turns),
        memory=memory_table(min(100_000, arguments.most_waiting), arguments.jobs),
    )
    print(text)
    arguments.output.write_text(text, encoding="utf-8")


REPORT = """# What scheduling itself costs

`{command}`. {machine}.

Ratios and times are median (least to most). Measured in turn, so that the ratios can be trusted more than the
times; the collection of garbage is left out.

## A step with 256 running

FCFS runs requests in the order in which they were made, one beside the other in memory. Any other order
costs time in all that looks at running requests, vLLM's own code included, so FCFS is measured a second time
over the same requests, shuffled. With the smaller number of blocks the KV cache is so short that it has to be
looked at when each running request ends (V5).

{steps}

## One request more or less

Of 20 jobs, beside what vLLM itself does.

{calls}

## Memory of a waiting request

Beside the request itself.

{memory}
"""


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    main()
