"""The waiting queue as a value: its state, the events that change it, and ``offer``.

``offer`` says which waiting request is next; everything else here is bookkeeping that a reader can
skip at first. It is written to be read, not to be fast: each call looks at every request.

**No starvation is prevented**: what the order prefers goes first for as long as it keeps coming. "labels" is
known to be a short job and "summaries" a long one; while much is free, each long request that arrives
passes the short one, which waits for ever if they keep coming:

>>> def run_to_its_end(state, request):
...     decoded = replace(request, output_tokens=request.max_tokens)
...     state = run(take(state, request.request_id), [decoded])
...     return end(state, request.request_id, by_itself=True)
>>> long = Request("long", "summaries", prompt_tokens=16, max_tokens=200)
>>> short = Request("short", "labels", prompt_tokens=16, max_tokens=8)
>>> state = start(Pool(usable_blocks=9, free_blocks=9), Settings(low_available_tokens_threshold=64))
>>> for request in (long, short) * 3:
...     state = run_to_its_end(arrive(state, request), request)
>>> state = arrive(state, short)
>>> offers = []
>>> for _ in range(100):
...     state = arrive(state, long)
...     offers.append(offer(state).request_id)
...     state = run_to_its_end(state, long)
>>> set(offers), [member.request.request_id for member in state.waiting]
({'long'}, ['short'])
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import Enum

from batchjob_spec import estimator, jobs, ordering, reservation
from batchjob_spec.blocks import blocks_for
from batchjob_spec.errors import DuplicateRequestError, WrongPhaseError
from batchjob_spec.jobs import Job, JobTable


@dataclass(frozen=True, slots=True)
class Settings:
    """The configuration keys that the rules depend on, with their defaults."""

    max_jobs: int = 20
    reserve_margin_blocks: int = 2
    reserve_max_blocks: int = 8
    low_available_tokens_threshold: int = 4096
    short_decode_token_threshold: int = 32
    ewma_alpha: float = estimator.DEFAULT_ALPHA
    look_ahead: bool = True
    order: str = "lpt"


@dataclass(frozen=True, slots=True)
class Pool:
    """The KV cache: ``usable_blocks`` of ``block_size`` tokens, of which ``free_blocks`` are free.

    A step computes at most ``step_tokens`` tokens of a request; ``lookahead_tokens`` are the slots
    that speculative decoding asks for on top. At most ``max_running`` requests run at a time. To start
    a request the engine may ask for ``padding_tokens`` slots besides, as it does for draft tokens.
    """

    usable_blocks: int
    free_blocks: int
    block_size: int = 16
    step_tokens: int = 8192
    lookahead_tokens: int = 0
    max_running: int = 256
    padding_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Request:
    """A request: what it names, what it asks for and how far it is, in tokens."""

    request_id: str
    job: str
    prompt_tokens: int
    max_tokens: int
    min_tokens: int = 0
    priority: int = 0
    output_tokens: int = 0
    computed_tokens: int = 0

    @property
    def known_tokens(self) -> int:
        """Prompt and output so far."""
        return self.prompt_tokens + self.output_tokens


class Phase(Enum):
    """Where a request is; one that has ended is nowhere."""

    WAITING = "waiting"
    TAKEN = "taken"  # the engine took it to start it, or has just stopped running it
    RUNNING = "running"
    WITHDRAWN = "withdrawn"  # taken off the queue, its end not yet reported


@dataclass(frozen=True, slots=True)
class Member:
    """A request in the system with what the queue remembers of it.

    ``arrival`` counts all requests, ``ordinal`` those of its job, as they arrive. ``started`` says
    that the engine has taken it before. ``preempted_at``
    is set while it waits after a preemption; ``held_back`` until a request ends after that (P4).
    """

    request: Request
    arrival: int
    ordinal: int
    phase: Phase = Phase.WAITING
    started: bool = False
    preempted_at: int | None = None
    held_back: bool = False


@dataclass(frozen=True, slots=True)
class State:
    """Everything that a choice depends on. ``clock`` counts events, so that moments are ordered."""

    pool: Pool
    settings: Settings = field(default_factory=Settings)
    priority_policy: bool = False
    members: tuple[Member, ...] = ()
    jobs: JobTable = field(default_factory=lambda: JobTable(Settings().max_jobs))
    clock: int = 0

    @property
    def waiting(self) -> tuple[Member, ...]:
        """Those in the queue, in order of arrival."""
        return tuple(member for member in self.members if member.phase is Phase.WAITING)

    @property
    def running(self) -> tuple[Member, ...]:
        """Those that the engine runs."""
        return tuple(member for member in self.members if member.phase is Phase.RUNNING)

    def find(self, request_id: str) -> Member | None:
        """The member of that ID."""
        return next((m for m in self.members if m.request.request_id == request_id), None)

    def job_of(self, member: Member) -> Job:
        """The job under which a member is scheduled (J4)."""
        return self.jobs.placed(member.request.job)


def start(pool: Pool, settings: Settings | None = None, priority_policy: bool = False) -> State:
    """An empty queue over ``pool``.

    >>> len(start(Pool(usable_blocks=9, free_blocks=9)).waiting)
    0
    """
    settings = settings or Settings()
    return State(pool, settings, priority_policy, jobs=JobTable(settings.max_jobs))


# --- the choice -----------------------------------------------------------------------------------


def reserved_blocks(state: State) -> int:
    """V1 and V2 over the running requests: the blocks that no new work may take.

    >>> request = Request("a", "news", prompt_tokens=32, max_tokens=8)
    >>> state = arrive(start(Pool(usable_blocks=9, free_blocks=9)), request)
    >>> reserved_blocks(state), reserved_blocks(run(take(state, "a"), [request]))
    (2, 3)
    """
    pool = state.pool
    needed = sum(
        reservation.next_step_blocks(
            member.request.computed_tokens,
            member.request.known_tokens,
            pool.step_tokens,
            pool.lookahead_tokens,
            pool.block_size,
        )
        for member in state.running
    )
    settings = state.settings
    return reservation.reserve_blocks(needed, settings.reserve_margin_blocks, settings.reserve_max_blocks)


def budget_tokens(state: State) -> int:
    """V3: the tokens that new work may take now.

    >>> budget_tokens(start(Pool(usable_blocks=9, free_blocks=5)))   # three blocks of 16
    48
    """
    pool = state.pool
    return reservation.budget_tokens(pool.free_blocks, reserved_blocks(state), pool.block_size)


def need_tokens(member: Member) -> int:
    """V4: the tokens that a waiting member has to compute before it can decode.

    >>> need_tokens(Member(Request("a", "news", 60, max_tokens=8, output_tokens=7), arrival=0, ordinal=0))
    67
    """
    request = member.request
    return reservation.need_tokens(request.prompt_tokens, request.output_tokens, request.computed_tokens)


def charged_tokens(state: State, member: Member) -> int:
    """V4: what must be free for it: its need, less what its job shares while the engine has another of it.

    What nobody holds may be handed out again before the request starts.

    >>> state = start(Pool(usable_blocks=40, free_blocks=40))
    >>> for name in "abcd":
    ...     state = arrive(state, Request(name, "news", prompt_tokens=100, max_tokens=8))
    >>> for name in "abc":
    ...     state = found_in_cache(take(state, name), name, tokens=64)
    >>> charged_tokens(state, state.find("d"))
    36
    >>> for name in "abc":
    ...     state = end(state, name, by_itself=True)
    >>> charged_tokens(state, state.find("d"))
    100
    """
    job = state.job_of(member)
    shared = reservation.shared_tokens(job.found)
    if shared and not any(_is_with_engine(other) and state.job_of(other) == job for other in state.members):
        shared = 0
    return reservation.charged_tokens(need_tokens(member), shared)


def can_never_fit(member: Member, pool: Pool) -> bool:
    """P2: prompt and output so far, with padding and look-ahead slots, are more than the whole pool holds.

    The engine would wait for room that there can never be, and what is behind it with it. Whether it asks
    for padding depends on what others left in the KV cache, so a request must find room with it.

    >>> member = Member(Request("a", "news", 33, max_tokens=8), arrival=0, ordinal=0)
    >>> can_never_fit(member, Pool(usable_blocks=2, free_blocks=0)), can_never_fit(member, Pool(3, 0))
    (True, False)
    >>> can_never_fit(member, Pool(3, 0, lookahead_tokens=8, padding_tokens=8))
    True
    """
    slots = member.request.known_tokens + pool.padding_tokens + pool.lookahead_tokens
    return blocks_for(slots, pool.block_size) > pool.usable_blocks


def remaining_tokens(state: State, member: Member) -> int:
    """E4, E5 and V5: what a member is predicted to decode within the look-ahead.

    A request of a job of which nothing was observed is taken to go on to its cap. One that has not
    started is taken to be like its job.

    >>> request = Request("a", "news", prompt_tokens=16, max_tokens=200)
    >>> state = run(take(arrive(start(Pool(9, 9)), request), "a"), [replace(request, output_tokens=50)])
    >>> remaining_tokens(state, state.find("a"))
    150
    """
    estimate, request = state.job_of(member).estimate, member.request
    predicted = estimator.predicted_tokens(estimate)
    if member.phase is Phase.WAITING and member.preempted_at is None:
        unknown = reservation.LOOK_AHEAD_TOKENS
        return reservation.within_look_ahead(predicted if estimate.observations else unknown)
    total = estimator.held_between(
        predicted if estimate.observations else request.max_tokens, request.min_tokens, request.max_tokens
    )
    return reservation.within_look_ahead(estimator.remaining_tokens(total, request.output_tokens))


def predicted_peak_tokens(state: State, candidate: Member) -> int:
    """V5 for what runs and ``candidate``; what they hold is counted in whole blocks.

    >>> first, second = (Request(name, "news", prompt_tokens=20, max_tokens=100) for name in "ab")
    >>> state = arrive(arrive(start(Pool(9, 9)), first), second)
    >>> state = run(take(state, "a"), [first])
    >>> predicted_peak_tokens(state, state.find("b"))   # 32 tokens each until "a" ends, then "b" goes on
    288
    """
    size = state.pool.block_size
    running = (
        (blocks_for(member.request.known_tokens, size) * size, remaining_tokens(state, member))
        for member in state.running
    )
    needed = blocks_for(charged_tokens(state, candidate), size) * size
    return reservation.predicted_peak_tokens(running, (needed, remaining_tokens(state, candidate)))


def attainable_tokens(state: State) -> int:
    """V5: what the running requests and a new one may hold together.

    >>> attainable_tokens(start(Pool(usable_blocks=10, free_blocks=10)))   # 19/20 of 160
    152
    """
    pool = state.pool
    running_blocks = sum(
        blocks_for(
            min(member.request.known_tokens, member.request.computed_tokens + pool.step_tokens),
            pool.block_size,
        )
        for member in state.running
    )
    return reservation.attainable_tokens(pool.free_blocks, running_blocks, pool.block_size)


def is_held_back(state: State, member: Member) -> bool:
    """V5 and P4: others run, and the predicted peak has no room for it.

    Were it admitted, one of them would soon be preempted and computed a second time. Without the
    look-ahead this holds only for what was just preempted.

    >>> first, second = (Request(name, "news", prompt_tokens=16, max_tokens=100) for name in "ab")
    >>> state = arrive(arrive(start(Pool(usable_blocks=8, free_blocks=8)), first), second)
    >>> is_held_back(state, state.find("b"))   # nothing runs
    False
    >>> state = resize(run(take(state, "a"), [first]), free_blocks=7)
    >>> is_held_back(state, state.find("b"))   # both may go on for more than 8 blocks hold
    True
    """
    if not state.running or not (state.settings.look_ahead or member.held_back):
        return False
    return predicted_peak_tokens(state, member) > attainable_tokens(state)


def order_key(state: State, member: Member) -> ordering.OrderKey:
    """O0 to O5: the place of a waiting member in the order, least first.

    >>> state = start(Pool(usable_blocks=9, free_blocks=9))
    >>> for number, prompt in enumerate([20, 20, 20, 20, 50]):   # three probes, then the longest first
    ...     state = arrive(state, Request(f"r{number}", "news", prompt, max_tokens=8))
    >>> [m.request.request_id for m in sorted(state.waiting, key=lambda m: order_key(state, m))]
    ['r0', 'r1', 'r2', 'r4', 'r3']
    """
    request, job = member.request, state.job_of(member)
    priority = request.priority if state.priority_policy else 0
    if member.preempted_at is not None:
        return ordering.preempted_key(priority, member.preempted_at)
    if ordering.is_probe(member.ordinal, job.estimate.observations, job.started):
        return ordering.probe_key(priority, member.arrival)
    predicted = estimator.predicted_tokens(job.estimate)
    rank = ordering.class_rank(
        ordering.is_short(predicted, state.settings.short_decode_token_threshold),
        budget_tokens(state),
        state.settings.low_available_tokens_threshold,
    )
    need = need_tokens(member)
    return ordering.regular_key(priority, rank, predicted, job.appeared, need, member.arrival)


def budgets(state: State) -> tuple[int, ...]:
    """The budgets to try in turn, in tokens: while requests run V3 alone, and none while all slots are taken.

    P1: if nothing runs, nothing needs the reserve, so the free blocks and then the empty pool count.

    >>> budgets(start(Pool(usable_blocks=9, free_blocks=5)))
    (48, 80, 144)
    """
    pool = state.pool
    if len(state.running) >= pool.max_running:
        return ()
    if state.running:
        return (budget_tokens(state),)
    free, usable = pool.free_blocks * pool.block_size, pool.usable_blocks * pool.block_size
    return (budget_tokens(state), free, usable)


def admissible(state: State, budget: int) -> tuple[Member, ...]:
    """The waiting members that may be offered within ``budget`` tokens (V4, V5, P2, P4).

    >>> state = start(Pool(usable_blocks=9, free_blocks=9))
    >>> for name, prompt in [("a", 60), ("b", 20)]:
    ...     state = arrive(state, Request(name, "news", prompt, max_tokens=8))
    >>> [member.request.request_id for member in admissible(state, budget=48)]
    ['b']
    """
    return tuple(
        member
        for member in state.waiting
        if reservation.fits(charged_tokens(state, member), budget, state.pool.block_size)
        and not can_never_fit(member, state.pool)
        and not is_held_back(state, member)
    )


def offer(state: State) -> Request | None:
    """The waiting request to admit next, if any may be: of those that fit, the first in order (O6).

    >>> state = start(Pool(usable_blocks=10, free_blocks=10))
    >>> for name, prompt in [("a", 500), ("b", 40), ("c", 60)]:
    ...     state = arrive(state, Request(name, "news", prompt, max_tokens=8))
    >>> offer(state).request_id   # "a" can never fit, "b" is the first probe that does
    'b'
    """
    for budget in budgets(state):
        candidates = admissible(state, budget)
        if candidates:
            return min(candidates, key=lambda member: order_key(state, member)).request
    return None


def blend_choices(state: State) -> tuple[Request, ...]:
    """O5b: the requests of which ``order: blend`` offers one, first those of the first job in order.

    Priority, preempted requests and probes come first as ever (O0 to O2), and inside a job O5c names the
    request. Which job has its turn is left free here: it follows from a forecast, which may improve under
    an unchanged specification. While others run, a job that is ahead of its turn may be left out.

    >>> state = start(Pool(usable_blocks=20, free_blocks=20))
    >>> for name, job, prompt in [("a", "news", 40), ("b", "chat", 20), ("c", "chat", 60)]:
    ...     state = arrive(state, Request(name, job, prompt, max_tokens=8))
    >>> [request.request_id for request in blend_choices(state)]   # the first probe, whatever the job
    ['a']
    """
    for budget in budgets(state):
        keys = {member: order_key(state, member) for member in admissible(state, budget)}
        if keys:
            best = min(keys.values())
            if best[1] != ordering.Tier.REGULAR:
                return tuple(member.request for member, key in keys.items() if key == best)
            alike = sorted((key, member) for member, key in keys.items() if key[:2] == best[:2])
            in_turn = [member for _, member in alike if need_tokens(member) <= need_in_turn(state, member)]
            first_of_job = {state.job_of(member).name: member.request for member in reversed(in_turn)}
            return tuple(reversed(first_of_job.values()))
    return ()


def need_in_turn(state: State, member: Member) -> int:
    """O5c: the need whose turn it is in a member's job, in tokens; if it does not fit, the longest that fits.

    It is looked up among all that wait of the job, at the member's priority, and were not preempted.

    >>> state = start(Pool(usable_blocks=20, free_blocks=20))
    >>> for number, prompt in enumerate([20, 20, 20, 80, 40, 60]):
    ...     state = arrive(state, Request(f"r{number}", "news", prompt, max_tokens=8))
    >>> for number in range(3):                   # once the three probes have started
    ...     state = take(state, f"r{number}")
    >>> need_in_turn(state, state.find("r3"))     # the last of 40, 60 and 80
    80
    """
    job = state.job_of(member)
    needs = sorted(
        need_tokens(other)
        for other in state.waiting
        if state.job_of(other).name == job.name
        and other.preempted_at is None
        and not can_never_fit(other, state.pool)
        and (not state.priority_policy or other.request.priority == member.request.priority)
    )
    return needs[ordering.place_in_turn(job.started, len(needs))]


def unservable(state: State) -> tuple[Request, ...]:
    """P2: the waiting requests that can never fit, to be ended with an error.

    A request may also outgrow the pool while it decodes; it is named when it is preempted and waits again.

    >>> state = arrive(start(Pool(usable_blocks=2, free_blocks=2)), Request("a", "news", 33, max_tokens=8))
    >>> [request.request_id for request in unservable(state)], offer(state)
    (['a'], None)
    """
    return tuple(m.request for m in state.waiting if can_never_fit(m, state.pool))


# --- the events -----------------------------------------------------------------------------------


def arrive(state: State, request: Request) -> State:
    """A new request waits (Q1).

    Raises:
        DuplicateRequestError: if a request of that ID has not ended yet.

    >>> state = arrive(start(Pool(9, 9)), Request("a", "news", prompt_tokens=20, max_tokens=8))
    >>> [member.request.request_id for member in state.waiting]
    ['a']
    >>> arrive(state, state.waiting[0].request)
    Traceback (most recent call last):
        ...
    batchjob_spec.errors.DuplicateRequestError: request 'a' arrived twice, allowed: once
    """
    if state.find(request.request_id):
        raise DuplicateRequestError(request.request_id)
    live = {*_live_names(state), request.job}
    table = jobs.track(state.jobs, request.job, live, state.clock)
    job = table.placed(request.job)
    member = Member(request, arrival=state.clock, ordinal=job.arrived)
    table = table.with_job(replace(job, arrived=job.arrived + 1, last_used=state.clock))
    return _tick(replace(state, members=(*state.members, member), jobs=table))


def take(state: State, request_id: str) -> State:
    """The engine takes a waiting request to start it; it counts as started from then on (O2).

    Raises:
        WrongPhaseError: if it does not wait.

    >>> state = arrive(start(Pool(9, 9)), Request("a", "news", prompt_tokens=20, max_tokens=8))
    >>> state = take(state, "a")
    >>> state.waiting, state.find("a").phase.value, state.jobs.placed("news").started
    ((), 'taken', 1)
    >>> take(state, "a")
    Traceback (most recent call last):
        ...
    batchjob_spec.errors.WrongPhaseError: request 'a' is taken, allowed: waiting
    """
    member = _expect(state, request_id, Phase.WAITING)
    taken = replace(member, phase=Phase.TAKEN, started=True, preempted_at=None, held_back=False)
    state = _with_member(state, taken)
    return _tick(state if member.started else _count_started(state, taken, 1))


def put_back(state: State, former: Member) -> State:
    """The engine could not start what it took: it waits again as ``former``, before it was taken.

    The engine may skip a request for reasons of its own, so that costs it neither its place nor a probe.

    Raises:
        WrongPhaseError: if it was not taken.

    >>> state = arrive(start(Pool(9, 9)), Request("a", "news", prompt_tokens=20, max_tokens=8))
    >>> (former,) = state.waiting
    >>> state = put_back(take(state, "a"), former)
    >>> state.waiting == (former,), state.jobs.placed("news").started
    (True, 0)
    """
    taken = _expect(state, former.request.request_id, Phase.TAKEN)
    state = _with_member(state, replace(former, ordinal=taken.ordinal, request=taken.request))
    return _tick(state if former.started else _count_started(state, former, -1))


def found_in_cache(state: State, request_id: str, tokens: int) -> State:
    """A request started for the first time and found so many of its tokens in the prefix cache (V4).

    Of one that is unknown nothing is learnt.

    >>> state = take(arrive(start(Pool(9, 9)), Request("a", "news", prompt_tokens=20, max_tokens=8)), "a")
    >>> found_in_cache(state, "a", tokens=16).jobs.placed("news").found
    (16,)
    """
    member = state.find(request_id)
    if member is None:
        return state
    job = state.job_of(member)
    found = (*job.found, tokens)[-reservation.STARTS_TO_KNOW_A_PREFIX :]
    return _tick(replace(state, jobs=state.jobs.with_job(replace(job, found=found))))


def refused(state: State, request_id: str) -> State:
    """The engine found no room for what was offered, so its job shares less than it seemed to (V4).

    Otherwise the same one would be offered again, and all that fits would wait behind it.

    >>> state = take(arrive(start(Pool(9, 9)), Request("a", "news", prompt_tokens=20, max_tokens=8)), "a")
    >>> refused(found_in_cache(state, "a", tokens=16), "a").jobs.placed("news").found
    ()
    """
    member = state.find(request_id)
    if member is None:
        return state
    return _tick(replace(state, jobs=state.jobs.with_job(replace(state.job_of(member), found=()))))


def run(state: State, requests: Iterable[Request]) -> State:
    """The engine now runs exactly these of the requests that it took, each as far as it says.

    Lengths are read from the engine and never counted here, so that a step cannot be missed.

    Raises:
        WrongPhaseError: if one of them was not taken.

    >>> request = Request("a", "news", prompt_tokens=20, max_tokens=8)
    >>> state = take(arrive(start(Pool(9, 9)), request), "a")
    >>> state = run(state, [replace(request, computed_tokens=20, output_tokens=1)])
    >>> [member.request.known_tokens for member in state.running]
    [21]
    """
    running = {request.request_id: request for request in requests}
    members = []
    for member in state.members:
        if member.request.request_id in running:
            _expect(state, member.request.request_id, Phase.TAKEN, Phase.RUNNING)
            request = running[member.request.request_id]
            member = replace(member, request=request, phase=Phase.RUNNING)
        elif member.phase is Phase.RUNNING:
            member = replace(member, phase=Phase.TAKEN)
        members.append(member)
    return _tick(replace(state, members=tuple(members)))


def preempt(state: State, request_id: str) -> State:
    """The engine throws a request out that ran: its KV cache is gone, its output is kept (O1, P4).

    Raises:
        WrongPhaseError: if it was neither taken nor running.

    >>> request = Request("a", "news", prompt_tokens=20, max_tokens=8)
    >>> state = take(arrive(start(Pool(9, 9)), request), "a")
    >>> state = run(state, [replace(request, computed_tokens=20, output_tokens=1)])
    >>> (member,) = preempt(state, "a").waiting
    >>> member.request.computed_tokens, member.request.output_tokens, member.held_back
    (0, 1, True)
    """
    member = _expect(state, request_id, Phase.TAKEN, Phase.RUNNING)
    waiting = replace(
        member,
        request=replace(member.request, computed_tokens=0),
        phase=Phase.WAITING,
        preempted_at=state.clock,
        held_back=True,
    )
    return _tick(_with_member(state, waiting))


def withdraw(state: State, request_id: str) -> State:
    """A request is taken off the queue; what is not there changes nothing (Q3).

    The engine reports the end afterwards, with :func:`end`; until then the request is not forgotten.

    >>> state = arrive(start(Pool(9, 9)), Request("a", "news", prompt_tokens=20, max_tokens=8))
    >>> withdraw(state, "b") == state, withdraw(state, "a").waiting
    (True, ())
    """
    member = state.find(request_id)
    if member is None or member.phase is not Phase.WAITING:
        return state
    return _tick(_with_member(state, replace(member, phase=Phase.WITHDRAWN)))


def end(state: State, request_id: str, by_itself: bool) -> State:
    """A request is over; its length is observed if it ended by itself (E3), and P4 is lifted.

    The length of one that was aborted or failed says nothing of its job. Of one that is unknown nothing
    changes, because an engine may report an end twice.

    >>> request = Request("a", "news", prompt_tokens=20, max_tokens=8)
    >>> state = run(take(arrive(start(Pool(9, 9)), request), "a"), [replace(request, output_tokens=5)])
    >>> for by_itself in (True, False):
    ...     print(end(state, "a", by_itself).jobs.placed("news").estimate)
    Estimate(observations=1, tokens=5.0)
    Estimate(observations=0, tokens=128.0)
    """
    member = state.find(request_id)
    if member is None:
        return state
    job = state.job_of(member)
    if by_itself:
        learnt = estimator.observe(job.estimate, member.request.output_tokens, state.settings.ewma_alpha)
        job = replace(job, estimate=learnt)
    table = state.jobs.with_job(replace(job, last_used=state.clock))
    members = tuple(replace(other, held_back=False) for other in state.members if other is not member)
    state = replace(state, members=members, jobs=table)
    table, promoted = jobs.settle(table, _live_names(state), state.clock)
    state = replace(state, jobs=table)
    for name in promoted:
        state = _move_in(state, name)
    return _tick(state)


def resize(state: State, free_blocks: int) -> State:
    """The engine's pool has ``free_blocks`` free blocks now.

    >>> budget_tokens(resize(start(Pool(usable_blocks=9, free_blocks=9)), free_blocks=3))
    16
    """
    return _tick(replace(state, pool=replace(state.pool, free_blocks=free_blocks)))


# --- helpers --------------------------------------------------------------------------------------


def _tick(state: State) -> State:
    return replace(state, clock=state.clock + 1)


def _is_with_engine(member: Member) -> bool:
    return member.phase in (Phase.TAKEN, Phase.RUNNING)


def _live_names(state: State) -> set[str]:
    return {member.request.job for member in state.members}


def _with_member(state: State, member: Member) -> State:
    name = member.request.request_id
    members = tuple(member if old.request.request_id == name else old for old in state.members)
    return replace(state, members=members)


def _expect(state: State, request_id: str, *phases: Phase) -> Member:
    member = state.find(request_id)
    if member is None or member.phase not in phases:
        observed = member.phase.value if member else None
        raise WrongPhaseError(request_id, observed, " or ".join(phase.value for phase in phases))
    return member


def _count_started(state: State, member: Member, change: int) -> State:
    job = state.job_of(member)
    counted = replace(job, started=max(0, job.started + change))
    return replace(state, jobs=state.jobs.with_job(counted))


def _move_in(state: State, name: str) -> State:
    """J4: the requests of a name that just got its place count as its first ones, in their order."""
    members: list[Member] = []
    ordinal = started = 0
    for member in state.members:
        if member.request.job == name:
            if member.started:
                started += 1
            member = replace(member, ordinal=ordinal)
            ordinal += 1
        members.append(member)
    job = replace(state.jobs.placed(name), arrived=ordinal, started=started)
    return replace(state, members=tuple(members), jobs=state.jobs.with_job(job))
