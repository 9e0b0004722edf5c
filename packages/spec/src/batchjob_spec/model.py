"""The whole system: the waiting queue and a small engine that obeys it, as one value.

A history is a sequence of events from :func:`begin` on: a request arrives, the engine takes a step, a
running request stops, one is aborted, one is preempted. Small systems have so few states that all of
their histories can be looked at, and random histories of larger ones can be drawn.

The engine knows blocks, chunked prefill, look-ahead slots and preemption: what runs gets its blocks
first, in the order of admission; when one is missing, the request admitted last gives up all of its own;
if none had to, what :func:`batchjob_spec.queue.offer` names is started, until nothing is offered. It
shares no block between requests, and has no limit but the pool on how many run.

What is promised of every finite batch: no request is lost or ended twice, and engine steps alone bring
it to its end. What is **not** promised is fairness: a request may wait for as long as others keep
arriving that the order prefers, as the example in :mod:`batchjob_spec.queue` shows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from batchjob_spec import queue
from batchjob_spec.blocks import blocks_for
from batchjob_spec.jobs import Job
from batchjob_spec.ordering import PROBES_PER_JOB
from batchjob_spec.queue import Member, Pool, Request, Settings, State
from batchjob_spec.reservation import tokens_computed_next


@dataclass(frozen=True, slots=True)
class System:
    """The queue, who is yet to arrive, who has ended, and the blocks of what runs.

    ``held`` names the running requests in the order of their admission, each with its blocks.
    """

    state: State
    absent: tuple[Request, ...] = ()
    ended: frozenset[str] = frozenset()
    held: tuple[tuple[str, int], ...] = ()

    @property
    def running(self) -> tuple[str, ...]:
        """The IDs of what runs, in the order of admission."""
        return tuple(name for name, _ in self.held)

    @property
    def free_blocks(self) -> int:
        """The blocks that no running request holds."""
        return self.state.pool.usable_blocks - sum(blocks for _, blocks in self.held)

    def request(self, name: str) -> Request:
        """The request of that ID, which has arrived and not ended."""
        member = self.state.find(name)
        assert member is not None, f"{name!r} has not arrived or has ended"
        return member.request


def begin(
    requests: Iterable[Request], pool: Pool, settings: Settings | None = None, priority_policy: bool = False
) -> System:
    """An idle engine and an empty queue; ``requests`` are yet to arrive."""
    return System(queue.start(pool, settings, priority_policy), absent=tuple(requests))


# --- the events -----------------------------------------------------------------------------------


def arrive(system: System, name: str) -> System:
    """The absent request of that ID arrives."""
    (request,) = (request for request in system.absent if request.request_id == name)
    absent = tuple(other for other in system.absent if other is not request)
    return replace(system, state=queue.arrive(system.state, request), absent=absent)


def stop(system: System, name: str) -> System:
    """The token that a running request sampled last was its last: it ends by itself (E3)."""
    return _end(system, name, by_itself=True)


def abort(system: System, name: str) -> System:
    """A waiting or running request is ended from outside."""
    return _end(replace(system, state=queue.withdraw(system.state, name)), name, by_itself=False)


def preempt(system: System, name: str) -> System:
    """A running request gives up its blocks and waits again (O1)."""
    held = tuple(entry for entry in system.held if entry[0] != name)
    return _seen_by_the_queue(replace(system, state=queue.preempt(system.state, name), held=held))


def step(system: System) -> System:
    """The engine takes one step."""
    *_, after = moments(system)
    return after


def moments(system: System) -> Iterator[System]:
    """The states that one engine step goes through; the last one is the state after it.

    >>> request = Request("a", "news", prompt_tokens=20, max_tokens=1)
    >>> system = arrive(begin([request], Pool(usable_blocks=2, free_blocks=2)), "a")
    >>> [(moment.running, moment.free_blocks) for moment in moments(system)]
    [((), 2), (('a',), 0), ((), 2)]
    """
    for request in queue.unservable(system.state):
        system = abort(system, request.request_id)
    ran = system.running
    system = _with_blocks_for_what_runs(system)
    yield system
    if system.running == ran:
        while (started := _with_what_is_offered(system)) is not None:
            system = started
            yield system
    yield _computed(system)


def _with_blocks_for_what_runs(system: System) -> System:
    """Each running request gets the blocks of its step, at the cost of the one admitted last."""
    for name in system.running:
        while name in system.running:
            blocks = _blocks_in_this_step(system, name)
            missing = blocks - dict(system.held)[name]
            if missing <= system.free_blocks:
                system = _holding(system, name, blocks)
                break
            system = preempt(system, system.running[-1])
    return system


def _with_what_is_offered(system: System) -> System | None:
    """The system with the offered request started, if one is offered and finds room."""
    offered = queue.offer(system.state)
    if offered is None:
        return None
    name, pool = offered.request_id, system.state.pool
    blocks = _blocks_in_this_step(system, name)
    if max(blocks, blocks_for(offered.known_tokens, pool.block_size)) > system.free_blocks:
        return None
    return _holding(replace(system, state=queue.take(system.state, name)), name, blocks)


def _computed(system: System) -> System:
    """What runs is computed; what has caught up samples a token, and ends if that was its last."""
    requests = [_advanced(system.request(name), system.state.pool) for name in system.running]
    system = replace(system, state=queue.run(system.state, requests))
    for request in requests:
        if request.output_tokens == request.max_tokens:
            system = stop(system, request.request_id)
    return system


def _advanced(request: Request, pool: Pool) -> Request:
    computed = request.computed_tokens + tokens_computed_next(
        request.computed_tokens, request.known_tokens, pool.step_tokens
    )
    sampled = int(computed == request.known_tokens)
    return replace(request, computed_tokens=computed, output_tokens=request.output_tokens + sampled)


def _blocks_in_this_step(system: System, name: str) -> int:
    pool = system.state.pool
    computed = _advanced(system.request(name), pool).computed_tokens
    return blocks_for(computed + pool.lookahead_tokens, pool.block_size)


def _holding(system: System, name: str, blocks: int) -> System:
    held = {**dict(system.held), name: blocks}
    return _seen_by_the_queue(replace(system, held=tuple(held.items())))


def _seen_by_the_queue(system: System) -> System:
    """The queue reads from the engine what runs and what is free."""
    state = queue.run(system.state, [system.request(name) for name in system.running])
    return replace(system, state=queue.resize(state, system.free_blocks))


def _end(system: System, name: str, by_itself: bool) -> System:
    held = tuple(entry for entry in system.held if entry[0] != name)
    state = queue.end(system.state, name, by_itself)
    return _seen_by_the_queue(replace(system, state=state, held=held, ended=system.ended | {name}))


# --- states that differ in their past alone ---------------------------------------------------------


def canonical(system: System) -> System:
    """The one system that stands for all with the same future.

    Moments are only compared with moments of their kind, so they become ranks. Counts are only compared
    with ``PROBES_PER_JOB``, so they need not be greater.

    >>> pool, request = Pool(usable_blocks=2, free_blocks=2), Request("a", "news", 20, max_tokens=1)
    >>> early = arrive(begin([request], pool), "a")
    >>> late = replace(early, state=queue.resize(early.state, free_blocks=2))   # the clock went on
    >>> early == late, canonical(early) == canonical(late)
    (False, True)
    """
    state = system.state
    arrivals = _ranks(member.arrival for member in state.members)
    preemptions = _ranks(m.preempted_at for m in state.members if m.preempted_at is not None)
    appearances = _ranks(job.appeared for job in state.jobs.tracked)
    uses = _ranks(job.last_used for job in state.jobs.tracked)

    def member_now(member: Member) -> Member:
        preempted_at = None if member.preempted_at is None else preemptions[member.preempted_at]
        ordinal = min(member.ordinal, PROBES_PER_JOB)
        return replace(member, arrival=arrivals[member.arrival], ordinal=ordinal, preempted_at=preempted_at)

    def job_now(job: Job) -> Job:
        observations = min(job.estimate.observations, PROBES_PER_JOB)
        return replace(
            job,
            appeared=appearances[job.appeared],
            last_used=uses[job.last_used],
            arrived=min(job.arrived, PROBES_PER_JOB),
            started=min(job.started, PROBES_PER_JOB),
            estimate=replace(job.estimate, observations=observations),
        )

    table = replace(state.jobs, tracked=tuple(map(job_now, state.jobs.tracked)))
    members = tuple(map(member_now, state.members))
    clock = max(len(members), len(table.tracked))
    return replace(system, state=replace(state, members=members, jobs=table, clock=clock))


def _ranks(moments: Iterable[int]) -> dict[int, int]:
    return {moment: rank for rank, moment in enumerate(sorted(set(moments)))}
