"""Rules O0 to O5c: the order in which waiting requests are preferred.

The order is a tuple to sort by, least first. Whether a request fits is no part of it: what does not
fit is left out before the order is looked at (O6).
"""

from __future__ import annotations

from enum import IntEnum

PROBES_PER_JOB = 3
"""O2: how many requests of a job run early, so that its decode length is known soon."""

ONE = 1 << 16
GOLDEN_SECTION = 40503
"""O5c: the golden section of ``ONE``. Whole numbers, so that no rounding differs between implementations."""

SHORTEST_EACH = 8
"""O5c: each time so many have started, the shortest is taken."""

OrderKey = tuple[int, ...]


class Tier(IntEnum):
    """O1 and O2: preempted requests come first, then probes, then the rest."""

    PREEMPTED = 0
    PROBE = 1
    REGULAR = 2


def is_probe(ordinal: int, observations: int, started: int) -> bool:
    """O2: one of a job's first requests, of a job of which little was observed and little has started.

    ``ordinal`` counts the requests of the job as they arrive, from 0. Without probes the length of a
    job that is placed late would be learnt late, when its order matters no more.

    >>> is_probe(2, 0, 0), is_probe(3, 0, 0), is_probe(0, 3, 0), is_probe(0, 0, 3)
    (True, False, False, False)

    pre: ordinal >= 0
    pre: observations >= 0
    pre: started >= 0
    post: __return__ != (ordinal >= 3 or observations >= 3 or started >= 3)
    """
    return ordinal < PROBES_PER_JOB and observations < PROBES_PER_JOB and started < PROBES_PER_JOB


def is_short(predicted: int, short_decode_token_threshold: int) -> bool:
    """O3: a job is short if its predicted decode length is at most the threshold.

    >>> is_short(32, 32), is_short(33, 32)
    (True, False)

    post: __return__ != (predicted > short_decode_token_threshold)
    """
    return predicted <= short_decode_token_threshold


def class_rank(short: bool, budget: int, low_available_tokens_threshold: int) -> int:
    """O4: long jobs first while more than the threshold is free, else short jobs first.

    What decodes long must start early, or it runs alone at the end. Short ones fill what is left over,
    and give it back soon.

    >>> class_rank(False, 5000, 4096), class_rank(True, 5000, 4096), class_rank(True, 4096, 4096)
    (0, 1, 0)

    pre: budget >= 0
    post: __return__ in (0, 1)
    post: __return__ == 0 or short == (budget > low_available_tokens_threshold)
    """
    long_first = budget > low_available_tokens_threshold
    return int(short == long_first)


def preempted_key(priority: int, preempted_at: int) -> OrderKey:
    """O0 and O1: preempted requests before all others of their priority, the one preempted first.

    They are what the engine has spent work on already, and a long wait would cost the makespan.

    >>> preempted_key(0, 9) < probe_key(0, 1) < preempted_key(1, 2)
    True

    post: __return__ < probe_key(priority, 0) and __return__ > probe_key(priority - 1, 0)
    """
    return (priority, Tier.PREEMPTED, preempted_at)


def probe_key(priority: int, arrival: int) -> OrderKey:
    """O0 and O2: then the probes of that priority, the one that arrived first.

    >>> probe_key(0, 9) < regular_key(0, 0, 500, 1, 40, 7)
    True

    post: preempted_key(priority, 0) < __return__ < preempted_key(priority + 1, 0)
    """
    return (priority, Tier.PROBE, arrival)


def regular_key(
    priority: int, rank: int, predicted: int, job_appeared: int, need: int, arrival: int
) -> OrderKey:
    """O0, O4 and O5: the class of the job, its prediction, the job; inside it the need, then arrival.

    The job stands before the need, so that requests of one job run together and share their prefix.

    >>> regular_key(0, 0, 500, 1, 40, 7) < regular_key(0, 0, 400, 0, 90, 2)   # the greater prediction
    True
    >>> regular_key(0, 0, 500, 1, 90, 7) < regular_key(0, 0, 500, 1, 40, 2)   # inside a job the greater need
    True

    post: probe_key(priority, 0) < __return__ < preempted_key(priority + 1, 0)
    """
    return (priority, Tier.REGULAR, rank, -predicted, job_appeared, -need, arrival)


def place_in_turn(started: int, waiting: int) -> int:
    """O5c: of so many waiting requests of a job, sorted by need, the place of the one whose turn it is.

    However the needs of a job are spread, what was taken of it so far is spread likewise: the places
    step through the list by the golden section, which comes back to no part of it soon. So long prompts
    and short ones run side by side, and neither are left over for the end. Each eighth is the shortest,
    which costs next to nothing: an almost empty prompt may well have the longest answer.

    >>> [place_in_turn(started, 10) for started in range(9)]
    [0, 6, 2, 8, 4, 0, 7, 0, 9]

    pre: started >= 0
    pre: waiting >= 1
    post: 0 <= __return__ < waiting
    """
    if started % SHORTEST_EACH == SHORTEST_EACH - 1:
        return 0
    return started * GOLDEN_SECTION % ONE * waiting // ONE
