"""A device profile from a user's own log of steps."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from batchjob_testkit.simulator.profiles import TIMINGS, DeviceProfile, Timing

COLUMNS: Final = ("tokens", "context_tokens", "seconds")

_MAX_ROWS: Final = 2000
_MIN_ROWS: Final = 8
_STARTS: Final = 12
_MAX_ROUNDS: Final = 30


class StepLogError(ValueError):
    """A log of steps is of no use; the message says where and what is allowed."""


@dataclass(frozen=True, slots=True)
class StepRow:
    """A step: what it computed, the context lengths of its requests together, and how long it took."""

    tokens: float
    context_tokens: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Fit:
    """A profile under the timing that explains a log best, and what it leaves unexplained."""

    profile: DeviceProfile
    timing: Timing
    error_seconds: float
    """The root of the mean squared difference between a step's time and the profile's."""


def read_step_log(path: Path) -> list[StepRow]:
    """The steps of a CSV file with the columns ``tokens``, ``context_tokens`` and ``seconds``.

    Raises:
        StepLogError: with file, line and value, if one is missing or out of range.
    """
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
        if missing:
            raise StepLogError(
                f"{path}:1: columns {reader.fieldnames}, allowed: {', '.join(COLUMNS)} at least"
            )
        return [_row(path, reader.line_num, cells) for cells in reader]


def _row(path: Path, line: int, cells: dict[str, str]) -> StepRow:
    values = []
    for name in COLUMNS:
        try:
            value = float(cells[name])
        except (TypeError, ValueError):
            value = math.nan
        if not (value >= 0 and math.isfinite(value)):
            raise StepLogError(f"{path}:{line}: {name} is {cells[name]!r}, allowed: a number of at least 0")
        values.append(value)
    return StepRow(*values)


def fit_profile(rows: Sequence[StepRow], like: DeviceProfile) -> Fit:
    """The profile that explains the steps best, by least squares; the KV cache is that of ``like``.

    Steps bound by compute and steps bound by memory are told apart by trying many divisions, each
    improved until it agrees with the profile that it leads to.

    Raises:
        StepLogError: if there are too few steps, or only steps of one kind.
    """
    if len(rows) < _MIN_ROWS:
        raise StepLogError(f"{len(rows)} steps, allowed: at least {_MIN_ROWS}")
    sample = [rows[position * len(rows) // _MAX_ROWS] for position in range(_MAX_ROWS)]
    sample = sample if len(rows) > _MAX_ROWS else list(rows)
    fits = [
        fit for timing in TIMINGS for start in range(1, _STARTS) if (fit := _fit(sample, like, timing, start))
    ]
    if not fits:
        raise StepLogError(
            "no profile explains these steps, allowed: some steps of few tokens and some of thousands, "
            "each with different context lengths"
        )
    return min(fits, key=lambda fit: fit.error_seconds)


def _fit(rows: Sequence[StepRow], like: DeviceProfile, timing: Timing, start: int) -> Fit | None:
    by_tokens = sorted(row.tokens for row in rows)
    limit = by_tokens[start * len(rows) // _STARTS]
    computes = [row.tokens > limit for row in rows]
    for _ in range(_MAX_ROUNDS):
        coefficients = _non_negative_least_squares(
            [_terms(row, timing, bound) for row, bound in zip(rows, computes, strict=True)],
            [row.seconds for row in rows],
        )
        if coefficients is None:
            return None
        profile = replace(
            like,
            name="fitted",
            overhead_seconds=coefficients[0],
            seconds_per_token=coefficients[1],
            weight_seconds=coefficients[2],
            seconds_per_context_token=coefficients[3],
        )
        again = [_is_bound_by_compute(profile, timing, row) for row in rows]
        if again == computes:
            break
        computes = again
    squares = [
        (row.seconds - profile.step_seconds(timing, row.tokens, row.context_tokens)) ** 2 for row in rows
    ]
    return Fit(profile, timing, math.sqrt(math.fsum(squares) / len(rows)))


def _terms(row: StepRow, timing: Timing, bound_by_compute: bool) -> tuple[float, float, float, float]:
    reads = timing == "serial" or not bound_by_compute
    return (
        1.0,
        row.tokens if bound_by_compute else 0.0,
        0.0 if bound_by_compute else 1.0,
        row.context_tokens if reads else 0.0,
    )


def _is_bound_by_compute(profile: DeviceProfile, timing: Timing, row: StepRow) -> bool:
    reading = profile.seconds_per_context_token * row.context_tokens if timing == "overlap" else 0.0
    return profile.seconds_per_token * row.tokens > profile.weight_seconds + reading


def _non_negative_least_squares(
    terms: Sequence[Sequence[float]], values: Sequence[float]
) -> list[float] | None:
    """The same without terms whose coefficient would be negative: no part of a step takes time away."""
    kept = list(range(len(terms[0])))
    while True:
        found = _least_squares([[row[i] for i in kept] for row in terms], values)
        if found is None:
            return None
        least = min(range(len(kept)), key=found.__getitem__)
        if found[least] >= 0:
            coefficients = dict(zip(kept, found, strict=True))
            return [coefficients.get(i, 0.0) for i in range(len(terms[0]))]
        if len(kept) == 1:
            return None
        del kept[least]


def _least_squares(terms: Sequence[Sequence[float]], values: Sequence[float]) -> list[float] | None:
    """The coefficients of the terms that come closest to the values; None if they are not determined."""
    size = len(terms[0])
    scales = [math.sqrt(math.fsum(row[i] * row[i] for row in terms)) for i in range(size)]
    if not all(scales):
        return None
    # The normal equations of terms of length 1, so that no unit outweighs another.
    rows = [
        [math.fsum(t[i] * t[j] for t in terms) / (scales[i] * scales[j]) for j in range(size)]
        + [math.fsum(t[i] * value for t, value in zip(terms, values, strict=True)) / scales[i]]
        for i in range(size)
    ]
    for i in range(size):
        pivot = max(range(i, size), key=lambda k: abs(rows[k][i]))
        rows[i], rows[pivot] = rows[pivot], rows[i]
        if abs(rows[i][i]) < 1e-9:  # noqa: PLR2004 - of terms of length 1
            return None
        for k in range(size):
            if k != i:
                factor = rows[k][i] / rows[i][i]
                rows[k] = [left - factor * right for left, right in zip(rows[k], rows[i], strict=True)]
    return [rows[i][size] / rows[i][i] / scales[i] for i in range(size)]
