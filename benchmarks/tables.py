"""The tables of the benchmark, in Markdown, from the figures of its runs."""

from __future__ import annotations

import math
import os
import platform
import shlex
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

Cell = tuple[str, str, str]
"""Policy, workload and timing; its figures are means over the seeds."""


@dataclass(frozen=True, kw_only=True)
class Roles:
    """What the policies are to each other."""

    kinds: dict[str, str]
    """``peer``, ``clairvoyant``, ``ours`` or ``ablation``, by policy."""
    first: str
    """What all are compared with."""
    ours: str
    tuned: str
    """The name for the best of ``tuned_from`` on each workload, as who tries them all would choose."""
    tuned_from: tuple[str, ...]
    ablations: dict[str, str]
    """For each configuration key the policy that is ours with that key switched off."""


class Figures:
    """The figures of all runs, in the mean over the seeds."""

    def __init__(self, rows: Iterable[dict[str, Any]], roles: Roles) -> None:
        self.roles = roles
        self.kinds = roles.kinds | {roles.tuned: "peer"}
        by_cell: dict[Cell, list[dict[str, Any]]] = defaultdict(list)
        for row in rows:
            by_cell[row["policy"], row["workload"], row["timing"]].append(row)
        self._cells = by_cell
        self.workloads = list(dict.fromkeys(workload for _, workload, _ in by_cell))
        self.timings = list(dict.fromkeys(timing for _, _, timing in by_cell))
        for workload in self.workloads:
            for timing in self.timings:
                self._add_tuned(workload, timing)
        self.policies = [name for name in self.kinds if any(name == policy for policy, _, _ in by_cell)]

    def _add_tuned(self, workload: str, timing: str) -> None:
        tried = [name for name in self.roles.tuned_from if (name, workload, timing) in self._cells]
        if tried == list(self.roles.tuned_from):
            best = min(tried, key=lambda name: self.mean(name, workload, timing, "makespan_seconds"))
            self._cells[self.roles.tuned, workload, timing] = self._cells[best, workload, timing]

    def mean(self, policy: str, workload: str, timing: str, figure: str) -> float:
        """A figure in the mean over the seeds."""
        return fmean(float(row[figure]) for row in self._cells[policy, workload, timing])

    def ratio(self, policy: str, workload: str, timing: str, to: str) -> float:
        """The makespan as ratio to another policy's, in the geometric mean over the seeds."""
        pairs = zip(self._cells[policy, workload, timing], self._cells[to, workload, timing], strict=True)
        return geometric_mean(mine["makespan_seconds"] / its["makespan_seconds"] for mine, its in pairs)

    def gap_closed(self, policy: str, workload: str, timing: str) -> float:
        """The share of the first policy's way to the bound that a policy has gone."""
        bound = self.mean(policy, workload, timing, "bound_seconds")
        first, mine = (
            self.mean(name, workload, timing, "makespan_seconds") for name in (self.roles.first, policy)
        )
        return (first - mine) / (first - bound) if first > bound else 0.0

    def best_peer(self, workload: str, timing: str) -> str:
        """The peer that ends first, of those that do not know the future."""
        peers = [name for name in self.policies if self.kinds[name] == "peer"]
        return min(peers, key=lambda name: self.mean(name, workload, timing, "makespan_seconds"))

    def cells(self) -> list[tuple[str, str]]:
        """Each workload under each timing."""
        return [(workload, timing) for workload in self.workloads for timing in self.timings]


def geometric_mean(values: Iterable[float]) -> float:
    """The mean of ratios.

    >>> geometric_mean([0.5, 2.0])
    1.0
    """
    return math.exp(fmean(math.log(value) for value in values))


def markdown(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table; the first column is text, the others are figures.

    >>> print(markdown(["policy", "s"], [["FCFS", "1.5"]]))
    | policy | s |
    |---|--:|
    | FCFS | 1.5 |
    """
    lines = [head, ["---", *["--:"] * (len(head) - 1)], *rows]
    texts = ("| " + " | ".join(map(str, line)) + " |" for line in lines)
    return "\n".join(text.replace("| --- |", "|---|").replace(" --: |", "--:|") for text in texts)


SUMMARY = """Makespan as ratio to that of FCFS and of the best peer that does not know the future, in the
geometric mean over workloads and timings, and the share of FCFS's gap to the lower bound that is closed.
Below 1 is sooner. Preemptions are summed over the workloads, in the mean over seeds and timings."""


def report(figures: Figures, heading: str) -> str:
    """All tables."""
    first, ours = figures.roles.first, figures.roles.ours
    parts = ["# Throughput on the virtual clock", heading]
    if {first, ours} <= set(figures.policies):
        parts += [
            "## Summary",
            SUMMARY,
            summary(figures),
            *workload_summaries(figures),
            "## What each configuration key brings",
            "Makespan without the key as ratio to the default's: above 1, the key pays.",
            ablation(figures),
        ]
    for timing in figures.timings:
        parts += [f"## Timing `{timing}`", "Makespan as ratio to the lower bound:"]
        parts += [by_workload(figures, timing, "ratio_to_bound", "{:.3f}".format)]
        if first in figures.policies:
            parts += [f"Makespan as ratio to that of `{first}`:", ratios(figures, timing)]
    timing = figures.timings[0]
    parts += ["## Other figures", f"Under timing `{timing}`, means over the seeds."]
    for title, figure, show in OTHER_FIGURES:
        parts += [f"{title}:", by_workload(figures, timing, figure, show)]
    return "\n\n".join(parts) + "\n"


def command(session: str) -> str:
    """The command that runs a session with the arguments of this process."""
    return shlex.join(["nox", "-s", session, *(["--", *sys.argv[1:]] if sys.argv[1:] else [])])


def machine() -> str:
    """Where the CPU times were taken."""
    import vllm  # noqa: PLC0415 - takes seconds

    return (
        f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs, "
        f"Python {platform.python_version()}, vLLM {vllm.__version__}"
    )


def percent(value: float) -> str:
    """A share."""
    return f"{100 * value:.0f} %"


OTHER_FIGURES: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("Makespan in seconds", "makespan_seconds", "{:.1f}".format),
    ("Output tokens a second", "output_tokens_per_second", "{:.0f}".format),
    ("Steps", "steps", "{:.0f}".format),
    ("Tokens a step", "tokens_per_step", "{:.0f}".format),
    ("Preemptions", "preemptions", "{:.0f}".format),
    ("Tokens computed again", "recomputed_tokens", "{:.0f}".format),
    ("KV cache in use", "kv_use", percent),
    ("Seconds in the tail, from 95 % of the requests to the last", "tail_seconds", "{:.1f}".format),
    ("CPU time in the scheduler, ms a step", "scheduler_ms_per_step", "{:.2f}".format),
)


def summary(figures: Figures) -> str:
    """A row per policy over all workloads and timings."""
    rows = []
    for policy in figures.policies:
        to_first = [figures.ratio(policy, *cell, figures.roles.first) for cell in figures.cells()]
        to_best = [figures.ratio(policy, *cell, figures.best_peer(*cell)) for cell in figures.cells()]
        closed = [figures.gap_closed(policy, *cell) for cell in figures.cells()]
        preemptions = sum(figures.mean(policy, *cell, "preemptions") for cell in figures.cells())
        rows.append(
            [
                f"{policy} ({figures.kinds[policy]})",
                f"{geometric_mean(to_first):.3f}",
                f"{min(to_first):.3f}",
                f"{max(to_first):.3f}",
                f"{geometric_mean(to_best):.3f}",
                f"{fmean(closed):.2f}",
                f"{preemptions / len(figures.timings):.0f}",
            ]
        )
    head = [
        "policy",
        f"to {figures.roles.first}",
        "best",
        "worst",
        "to the best peer",
        "gap closed",
        "preemptions",
    ]
    return markdown(head, rows)


def workload_summaries(figures: Figures) -> Iterator[str]:
    """A table for each policy of ours."""
    for policy in figures.policies:
        if figures.kinds[policy] == "ours":
            yield f"Makespan of `{policy}` on each workload, as ratio to others'; and preemptions."
            yield workload_summary(figures, policy)


def workload_summary(figures: Figures, ours: str) -> str:
    """A row per workload and timing."""
    first = figures.roles.first
    clairvoyant = [name for name in figures.policies if figures.kinds[name] == "clairvoyant"]
    rows = []
    for cell in figures.cells():
        best = figures.best_peer(*cell)
        rows.append(
            [
                " ".join(cell),
                f"{figures.ratio(ours, *cell, first):.3f}",
                f"{figures.gap_closed(ours, *cell):.2f}",
                f"{figures.ratio(ours, *cell, best):.3f} ({best})",
                *(f"{figures.ratio(ours, *cell, name):.3f}" for name in clairvoyant),
                f"{figures.mean(first, *cell, 'preemptions'):.0f}",
                f"{figures.mean(ours, *cell, 'preemptions'):.0f}",
            ]
        )
    head = [
        "workload",
        f"to {first}",
        "gap closed",
        "to the best peer",
        *(f"to {name}" for name in clairvoyant),
    ]
    return markdown([*head, f"{first} preempts", f"{ours} preempts"], rows)


def ablation(figures: Figures) -> str:
    """A row per configuration key."""
    rows = []
    for key, policy in figures.roles.ablations.items():
        if policy not in figures.policies:
            continue
        brings = {cell: figures.ratio(policy, *cell, figures.roles.ours) for cell in figures.cells()}
        most, least = max(brings, key=brings.__getitem__), min(brings, key=brings.__getitem__)
        rows.append(
            [
                f"`{key}`",
                f"{geometric_mean(brings.values()):.3f}",
                *(f"{brings[cell]:.3f} ({' '.join(cell)})" for cell in (most, least)),
            ]
        )
    return markdown(["key", "in the mean", "where it brings most", "where it brings least"], rows)


def by_workload(figures: Figures, timing: str, figure: str, show: Callable[[float], str]) -> str:
    """A row per policy, a column per workload."""
    rows = [
        [policy, *(show(figures.mean(policy, workload, timing, figure)) for workload in figures.workloads)]
        for policy in figures.policies
    ]
    return markdown(["policy", *figures.workloads], rows)


def ratios(figures: Figures, timing: str) -> str:
    """The same for the makespan as ratio to FCFS's, with the geometric mean over the workloads."""
    rows = []
    for policy in figures.policies:
        values = [
            figures.ratio(policy, workload, timing, figures.roles.first) for workload in figures.workloads
        ]
        rows.append([policy, *(f"{value:.3f}" for value in values), f"{geometric_mean(values):.3f}"])
    return markdown(["policy", *figures.workloads, "geometric mean"], rows)
