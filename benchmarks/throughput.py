"""``nox -s bench``: every policy on every workload, on a virtual clock; writes docs/benchmarks/.

Prints a line per run as it ends, then the tables.
"""

from __future__ import annotations

import argparse
import csv
import logging
import multiprocessing
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from policies import BY_NAME, DEFAULT, FCFS, ROLES
from tables import Figures, command, machine, report

from batchjob_testkit.simulator.mixes import MIXES
from batchjob_testkit.simulator.plots import plot_ratios, plot_runs
from batchjob_testkit.simulator.profiles import PROFILES
from batchjob_testkit.simulator.simulation import Result, simulate

OUTPUT = Path(__file__).parent.parent / "docs" / "benchmarks"
NOT_NUMBERS = ("device", "workload", "policy", "timing", "job_finish_seconds")


@dataclass(frozen=True)
class Task:
    """A run to make."""

    device: str
    workload: str
    requests: int
    seed: int
    policy: str


@dataclass(frozen=True)
class Run:
    """A run that was made."""

    task: Task
    results: tuple[Result, ...]
    wall_seconds: float


def make(task: Task, *, keep_moments: bool = False) -> Run:
    """Make a run."""
    start = time.monotonic()
    profile, policy = PROFILES[task.device], BY_NAME[task.policy]
    mix = MIXES[task.workload]
    scenario = mix.scenario(task.workload, profile, requests=task.requests, seed=task.seed)
    try:
        results = simulate(policy.backend, policy.arrange(scenario), profile, keep_moments=keep_moments)
    except Exception as error:
        raise RuntimeError(f"{task}: {error}") from error
    return Run(task, tuple(results.values()), time.monotonic() - start)


def make_all(tasks: Sequence[Task], jobs: int) -> Iterator[Run]:
    """Make the runs, so many at a time; each is yielded as it ends."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=be_quiet) as pool:
        futures = [pool.submit(make, task) for task in tasks]
        try:
            for future in as_completed(futures):
                yield future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def be_quiet() -> None:
    """The engine's log lines say nothing about a simulation."""
    logging.disable(logging.WARNING)


def rows(runs: Iterable[Run]) -> Iterator[dict[str, object]]:
    """The figures of each run under each timing, by name."""
    for run in runs:
        for result in run.results:
            yield {
                **vars(run.task),
                **{
                    f.name: getattr(result, f.name)
                    for f in fields(result)
                    if f.compare and f.name != "scenario"
                },
                "ratio_to_bound": result.ratio_to_bound,
                "output_tokens_per_second": result.output_tokens_per_second,
                "tokens_per_step": result.tokens_per_step,
                "scheduler_ms_per_step": result.scheduler_ms_per_step,
            }


def read_csv(path: Path) -> list[dict[str, object]]:
    """The figures of earlier runs, as :func:`write_csv` wrote them."""
    with path.open(encoding="utf-8", newline="") as file:
        return [
            {name: text if name in NOT_NUMBERS else float(text) for name, text in row.items()}
            for row in csv.DictReader(file)
        ]


def task_of(row: dict[str, Any]) -> Task:
    """The run that a row of figures comes from."""
    return Task(row["device"], row["workload"], int(row["requests"]), int(row["seed"]), row["policy"])


def write_csv(path: Path, figures: Sequence[dict[str, object]]) -> None:
    """The figures of all runs, for whoever wants to look closer."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, figures[0], lineterminator="\n")
        writer.writeheader()
        for row in figures:
            writer.writerow({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()})


def ratios_to_bound(figures: Figures) -> dict[str, dict[str, dict[str, float]]]:
    """By timing, policy and workload, in the mean over the seeds."""
    return {
        timing: {
            policy: {
                workload: figures.mean(policy, workload, timing, "ratio_to_bound")
                for workload in figures.workloads
            }
            for policy in figures.policies
        }
        for timing in figures.timings
    }


def main() -> None:
    """Make the runs, print the tables, write them and the plots."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=600, help="of each workload (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=3, help="of each workload (default: %(default)s)")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count(), help="runs at a time (default: %(default)s)"
    )
    parser.add_argument("--device", choices=PROFILES, default="h100")
    parser.add_argument("--workloads", nargs="+", choices=MIXES, default=list(MIXES), metavar="NAME")
    parser.add_argument("--policies", nargs="+", choices=BY_NAME, default=list(BY_NAME), metavar="NAME")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--reuse", type=Path, metavar="RUNS.CSV", help="take from it what was run already")
    parser.add_argument("--no-plots", action="store_true")
    arguments = parser.parse_args()
    tasks = [
        Task(arguments.device, workload, arguments.requests, seed, policy)
        for workload in arguments.workloads
        for seed in range(arguments.seeds)
        for policy in arguments.policies
    ]
    reused = [row for row in read_csv(arguments.reuse) if task_of(row) in tasks] if arguments.reuse else []
    done = {task_of(row) for row in reused}
    left = [task for task in tasks if task not in done]
    runs = []
    arguments.output.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    for number, run in enumerate(make_all(left, arguments.jobs), 1):
        runs.append(run)
        ratios = ", ".join(f"{result.timing} {result.ratio_to_bound:.3f}" for result in run.results)
        names = f"{run.task.workload}, seed {run.task.seed}, {run.task.policy}"
        print(f"[{number}/{len(left)}] {names}: {ratios} of the bound, {run.wall_seconds:.0f} s", flush=True)
        # It takes hours: what is done can be reused if it does not come to its end.
        write_csv(arguments.output / "runs.csv", [*reused, *rows(runs)])
    all_rows = sorted([*reused, *rows(runs)], key=lambda row: tasks.index(task_of(row)))
    figures = Figures(all_rows, ROLES)
    minutes = (time.monotonic() - start) / 60
    heading = (
        f"`{command('bench')}`: {len(tasks)} runs of {arguments.requests} requests, "
        f"{arguments.seeds} for each policy and workload, device `{arguments.device}`, "
        f"{len(left)} of them in {minutes:.0f} minutes with {arguments.jobs} at a time. {machine()}."
    )
    text = report(figures, heading)
    print(text)
    (arguments.output / "throughput.md").write_text(text, encoding="utf-8")
    write_csv(arguments.output / "runs.csv", all_rows)
    if not arguments.no_plots:
        plot_ratios(
            arguments.output / "ratio-to-bound.svg",
            ratios_to_bound(figures),
            "makespan as ratio to the bound",
        )
        for workload in arguments.workloads:
            compared = [name for name in (FCFS, DEFAULT) if name in arguments.policies]
            tasks = [Task(arguments.device, workload, arguments.requests, 0, name) for name in compared]
            results = {task.policy: make(task, keep_moments=True).results[0] for task in tasks}
            plot_runs(arguments.output / f"{workload}.svg", results)


if __name__ == "__main__":
    be_quiet()
    main()
