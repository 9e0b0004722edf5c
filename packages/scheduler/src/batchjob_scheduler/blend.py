"""Jobs side by side, and in each of them long prompts beside short ones (``order: blend``, rules O5b, O5c).

Work of one kind after work of another leaves the device half idle twice: decodes alone read memory, prefill
alone computes. So jobs take turns, each admitted evenly over the time that it has, and a job that has no
time to spare goes first as long as its decodes fill the steps by themselves. Inside a job, needs are taken
as they are spread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

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
        path = left.path_steps.get(job.name, 0.0)
        spare = left.steps - (job.estimator.long_tokens if left.is_thin else path)
        stride = max(spare, _LEAST_SLACK * left.steps) / max(1, job.waiting)
        job.turn += stride
        return stride

    def order(self, jobs: Sequence[Job], left: Forecast, *, idle: bool) -> list[Job]:
        """The jobs to admit from, the first one first; a job far ahead of its turn is left out.

        Steps that the critical work alone leaves thin are shared by all jobs. Otherwise the critical jobs
        come first, longest first, and the others take turns. An idle engine leaves no job out (P1).
        """
        in_turn = sorted(jobs, key=lambda job: (job.turn, job.appeared))
        if not in_turn:
            return []
        self._now = in_turn[0].turn
        if not left.is_thin:
            critical = [job for job in in_turn if left.is_critical(job.name)]
            critical.sort(key=lambda job: job.order_key)
            return critical + [job for job in in_turn if not left.is_critical(job.name)]
        latest = self._now + _MOST_LEAD * left.steps
        return in_turn if idle else [job for job in in_turn if job.turn <= latest]
