"""Plots of runs, as SVG files. They need matplotlib: ``pip install 'batchjob-testkit[plot]'``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from colorsys import hsv_to_rgb
from pathlib import Path
from typing import Any, Final

from batchjob_testkit.simulator.simulation import Moment, Result

_POINTS: Final = 150
_USUAL_COLOURS: Final = 10
_MARKERS: Final = "osD^v<>PX*pHdh"


def plot_runs(path: Path, runs: Mapping[str, Result]) -> None:
    """Batch size by job and KV cache use over time, a column for each run, by its label.

    The runs must have kept their moments. A job has the same colour in each column.
    """
    figure, axes = _subplots(2, len(runs), figsize=(5 * len(runs), 5), sharex=True, sharey="row")
    jobs = list(
        dict.fromkeys(job for result in runs.values() for moment in result.moments for job in moment.running)
    )
    jobs.sort(key=lambda job: (len(job), job))  # "job 10" after "job 2"
    colours = dict(zip(jobs, distinct_colours(len(jobs)), strict=True))
    for column, (label, result) in enumerate(runs.items()):
        moments = thinned(result.moments)
        seconds = [moment.seconds for moment in moments]
        batch, cache = axes[0][column], axes[1][column]
        heights = [[moment.running.get(job, 0) for moment in moments] for job in jobs]
        batch.stackplot(seconds, heights, labels=jobs, colors=[colours[job] for job in jobs])
        batch.set_title(f"{label}: {result.makespan_seconds:.1f} s, {result.preemptions} preemptions")
        cache.plot(seconds, [100 * moment.kv_use for moment in moments], color="black", linewidth=1)
        cache.set_ylim(0, 105)
        cache.set_xlabel("seconds")
    axes[0][0].set_ylabel("requests in the batch")
    axes[1][0].set_ylabel("KV cache in use, %")
    handles, labels = axes[0][0].get_legend_handles_labels()
    columns = min(6, len(jobs))
    figure.legend(
        handles, labels, loc="upper center", bbox_to_anchor=(0.5, 0), ncols=columns, fontsize="small"
    )
    _save(figure, path)


def plot_ratios(path: Path, ratios: Mapping[str, Mapping[str, Mapping[str, float]]], title: str) -> None:
    """A number for each timing, policy and workload: a panel per timing, a marker per policy."""
    figure, axes = _subplots(1, len(ratios), figsize=(6 * len(ratios), 6), sharey=True)
    for panel, (timing, of_timing) in zip(axes[0], ratios.items(), strict=True):
        for number, (policy, by_workload) in enumerate(of_timing.items()):
            marker = _MARKERS[number % len(_MARKERS)]
            panel.plot(list(by_workload.values()), list(by_workload), marker, label=policy, alpha=0.7)
        panel.set_title(f"timing {timing}")
        panel.set_xlabel(title)
        panel.grid(axis="x", alpha=0.3)
    axes[0][0].invert_yaxis()
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper center", bbox_to_anchor=(0.5, 0), ncols=4, fontsize="small")
    _save(figure, path)


def thinned(moments: Sequence[Moment]) -> list[Moment]:
    """Some of the moments of a run, evenly spread over its time, the first and the last among them."""
    spacing = moments[-1].seconds / _POINTS
    kept: list[Moment] = []
    for moment in moments:
        if not kept or moment.seconds >= kept[-1].seconds + spacing or moment is moments[-1]:
            kept.append(moment)
    return kept


def distinct_colours(count: int) -> list[str | tuple[float, float, float]]:
    """So many colours of which no two are the same: the usual ones, or where they are too few a rainbow.

    >>> distinct_colours(2), len(set(distinct_colours(24)))
    (['C0', 'C1'], 24)
    """
    if count <= _USUAL_COLOURS:
        return [f"C{number}" for number in range(count)]
    # Neighbours differ in brightness, too.
    return [hsv_to_rgb(number / count, 0.7, 0.6 if number % 2 else 0.95) for number in range(count)]


def _subplots(rows: int, columns: int, **options: Any) -> Any:
    try:
        import matplotlib as mpl
        from matplotlib import pyplot as plt
    except ImportError:
        raise ModuleNotFoundError(
            "matplotlib is missing, which draws the plots: pip install 'batchjob-testkit[plot]'"
        ) from None
    mpl.use("svg")
    # The same figures make the same file.
    mpl.rcParams["svg.hashsalt"] = "batchjob"
    return plt.subplots(rows, columns, squeeze=False, layout="constrained", **options)


def _save(figure: Any, path: Path) -> None:
    from matplotlib import pyplot as plt

    figure.savefig(path, format="svg", bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)
