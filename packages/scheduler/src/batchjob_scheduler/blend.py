"""Jobs side by side, and in each of them long prompts beside short ones (``order: blend``, rules O5b, O5c).

Work of one kind after work of another leaves the device half idle twice: decodes alone read memory, prefill
alone computes. So jobs take turns, each admitted evenly over the time that it has, and a job that has no
time to spare goes first as long as its decodes fill the steps by themselves, or once all of it could start.
Inside a job, needs are taken as they are spread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from batchjob_scheduler.engine_view import EngineView
from batchjob_scheduler.forecast import Forecast
from batchjob_scheduler.jobs import Job

_LEAST_SLACK: Final = 0.05
"""What every job is taken to have to spare, as a share of the steps that are left."""

_MOST_LEAD: Final = 0.02
"""How far a job may be ahead of the one whose turn it is, as a share of the steps that are left."""


_ONE: Final = 1 << 16
_GOLDEN_SECTION: Final = 40503
"""Of ``_ONE``, in whole numbers: the specification says the same of it (O5c)."""

_SHORTEST_EACH: Final = 8
"""A prompt that is almost empty costs nothing to start, and may run away to its cap."""


def place_in_turn(started: int, waiting: int) -> int:
    """Of so many waiting requests of a job, sorted by need, the place of the one whose turn it is (O5c).

    Steps of the golden section come back to no part of the list soon; each eighth is the shortest.
    """
    if started % _SHORTEST_EACH == _SHORTEST_EACH - 1:
        return 0
    return (started * _GOLDEN_SECTION) % _ONE * waiting // _ONE


class Turns:
    """Whose turn it is, by stride scheduling: a job's turn moves on by its slack over what waits of it."""

    def __init__(self) -> None:
        self._now = 0.0

    def join(self, job: Job) -> None:
        """Requests of the job wait again; the turns that it missed meanwhile are not made up for."""
        job.turn = max(job.turn, self._now)

    def take(self, job: Job, left: Forecast) -> float:
        """One of its requests is taken; returns by how much its turn moved on."""
        stride = _spare_steps(job, left) * _cost_to_start(job, left) / max(1, job.waiting)
        job.turn += stride
        return stride

    def order(self, jobs: Sequence[Job], left: Forecast, engine: EngineView) -> list[Job]:
        """The jobs to admit from, the first one first; a job far ahead of its turn is left out.

        Steps that the critical work alone leaves thin are shared by all jobs, until all of it could start.
        Otherwise the jobs known to be critical come first, longest first, and the others take turns. An
        idle engine leaves no job out (P1).
        """
        in_turn = sorted(jobs, key=lambda job: (job.turn, job.appeared))
        if not in_turn:
            return []
        self._now = in_turn[0].turn
        if not left.is_thin or left.all_critical_fits(engine):
            return sorted(in_turn, key=lambda job: _place_before_turns(job, left))
        latest = self._now + _MOST_LEAD * left.steps
        return [job for job in in_turn if job.turn <= latest] if engine.running() else in_turn


def _place_before_turns(job: Job, left: Forecast) -> tuple[bool, tuple[int, int, str]]:
    """Jobs known to be critical, longest first; then all others alike, which leaves them in turn."""
    if job.is_known and left.is_critical(job.name):
        return False, job.order_key
    return True, (0, 0, "")


def _spare_steps(job: Job, left: Forecast) -> float:
    """The steps that the job has to spare before the end; all that are left while it is not known."""
    if not job.is_known:
        return left.steps
    path = job.estimator.long_tokens if left.is_thin else left.path_steps.get(job.name, 0.0)
    return max(left.steps - path, _LEAST_SLACK * left.steps)


def _cost_to_start(job: Job, left: Forecast) -> float:
    """What a prompt of a job that is not known costs, of what one costs in the mean; 1 for a known job.

    An engine that fills computes prefill alone. What starts cheaply fills it sooner, and decodes for other
    prompts to ride along with.
    """
    if job.is_known or not job.waiting:
        return 1.0
    return max(1.0, job.tokens_to_start / job.waiting) / left.mean_waiting_tokens
