"""What holds of every state, as predicates named by what they say.

They are checked on random histories and on all histories of small systems, and any queue that keeps a
:class:`batchjob_spec.queue.State` can be judged by them. :func:`broken` names those that do not hold:

>>> state = queue.arrive(queue.start(queue.Pool(10, 10)), Request("a", "news", 40, max_tokens=8))
>>> broken(state)
[]
>>> nothing_that_fits_waits_behind_what_does_not(state, None)   # if nothing were offered now
False
"""

from __future__ import annotations

from batchjob_spec import jobs, queue
from batchjob_spec.queue import Request, State


def every_request_is_there_once(state: State) -> bool:
    """Q1: no request is in the system twice."""
    names = [member.request.request_id for member in state.members]
    return len(names) == len(set(names))


def the_budget_is_within_the_free_blocks(state: State) -> bool:
    """V3: what may be handed out is never negative and never more than what is free."""
    pool = state.pool
    return 0 <= queue.budget_tokens(state) <= pool.free_blocks * pool.block_size


def the_reserve_is_within_its_limit(state: State) -> bool:
    """V2: the reserve never exceeds ``reserve_max_blocks``."""
    return 0 <= queue.reserved_blocks(state) <= state.settings.reserve_max_blocks


def what_is_offered_waits(state: State, offered: Request | None) -> bool:
    """Q2: only a request that is in the queue is offered."""
    return offered is None or any(member.request == offered for member in state.waiting)


def what_is_offered_fits(state: State, offered: Request | None) -> bool:
    """V4 and P1: what is offered fits the budget, or nothing runs and it fits the empty pool."""
    if offered is None:
        return True
    pool = state.pool
    limit = queue.budget_tokens(state) if state.running else pool.usable_blocks * pool.block_size
    needs = [queue.charged_tokens(state, member) for member in state.waiting if member.request == offered]
    return all(-(-need // pool.block_size) * pool.block_size <= limit for need in needs)


def nothing_that_fits_waits_behind_what_does_not(state: State, offered: Request | None) -> bool:
    """O6 and Q4: if anything is admissible and a slot is free, something is offered; without one, nothing."""
    if len(state.running) >= state.pool.max_running:
        return offered is None
    return offered is not None or not queue.admissible(state, queue.budget_tokens(state))


def nothing_that_fits_comes_before_what_is_offered(state: State, offered: Request | None) -> bool:
    """O0 to O5: what is offered is the first in the order among all that fit the budget."""
    candidates = queue.admissible(state, queue.budget_tokens(state))
    if offered is None or not candidates:
        return True
    places = {member.request.request_id: queue.order_key(state, member) for member in candidates}
    return places.get(offered.request_id) == min(places.values())


def an_idle_engine_is_offered_what_fits_the_empty_pool(state: State, offered: Request | None) -> bool:
    """P1: if nothing runs and something fits the empty pool, one is offered."""
    serveable = [m for m in state.waiting if not queue.can_never_fit(m, state.pool)]
    return bool(state.running) or not serveable or offered is not None


def the_order_is_total(state: State) -> bool:
    """Q5: no two waiting requests have the same place in the order."""
    keys = [queue.order_key(state, member) for member in state.waiting]
    return len(keys) == len(set(keys))


def jobs_stay_within_their_number(state: State) -> bool:
    """J4: at most ``max_jobs`` jobs are tracked beside the default one."""
    named = sum(job.name != jobs.DEFAULT_JOB for job in state.jobs.tracked)
    if state.jobs.max_jobs:
        return named <= state.jobs.max_jobs
    live = {member.request.job for member in state.members}
    return len(jobs.idle_jobs(state.jobs, live)) <= jobs.MAX_IDLE_JOBS


def a_job_is_displaced_only_while_every_place_is_live(state: State) -> bool:
    """J4: while a name waits for a place, no tracked job is idle and none is free."""
    live = {member.request.job for member in state.members}
    idle = jobs.idle_jobs(state.jobs, live)
    return not state.jobs.displaced or not (idle or jobs.has_free_place(state.jobs))


def the_default_job_waits_for_no_place(state: State) -> bool:
    """J4: the default job has its place beside the others, since those without one share it."""
    return jobs.DEFAULT_JOB not in state.jobs.displaced


STATE_INVARIANTS = (
    every_request_is_there_once,
    the_budget_is_within_the_free_blocks,
    the_reserve_is_within_its_limit,
    the_order_is_total,
    jobs_stay_within_their_number,
    a_job_is_displaced_only_while_every_place_is_live,
    the_default_job_waits_for_no_place,
)
"""Hold of a state by itself."""

OFFER_INVARIANTS = (
    what_is_offered_waits,
    what_is_offered_fits,
    nothing_that_fits_waits_behind_what_does_not,
    nothing_that_fits_comes_before_what_is_offered,
    an_idle_engine_is_offered_what_fits_the_empty_pool,
)
"""Hold of a state and of what is offered in it."""


def broken(state: State) -> list[str]:
    """The names of the invariants that do not hold of ``state`` and of what is offered in it."""
    offered = queue.offer(state)
    return [rule.__name__ for rule in STATE_INVARIANTS if not rule(state)] + [
        rule.__name__ for rule in OFFER_INVARIANTS if not rule(state, offered)
    ]
