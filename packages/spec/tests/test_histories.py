"""The rules hold after every event of random histories, and each invariant can be broken.

The events of the first histories come in any order, also in one that no engine produces. Those of the
second come from the specification's own engine, which then brings the batch to its end.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchjob_spec import invariants, model, queue
from batchjob_spec.errors import DuplicateRequestError, WrongPhaseError
from batchjob_spec.jobs import DEFAULT_JOB, JobTable
from batchjob_spec.queue import Phase, Pool, Request, Settings

sys.path.insert(0, str(Path(__file__).parent))
import exhaustive  # the script beside this file, which looks at all histories of small systems

BLOCK = 16


def request(name, job="news", prompt=BLOCK, **fields):
    return Request(name, job, prompt, **{"max_tokens": 200, **fields})


@st.composite
def histories(draw):
    """The states after each event of a random history."""
    pool = Pool(usable_blocks=(usable := draw(st.integers(1, 20))), free_blocks=usable)
    settings = Settings(
        max_jobs=draw(st.integers(0, 2)),
        reserve_margin_blocks=draw(st.integers(0, 4)),
        low_available_tokens_threshold=draw(st.sampled_from([0, 100, 4096])),
        look_ahead=draw(st.booleans()),
    )
    state = queue.start(pool, settings, draw(st.booleans()))
    states = [state]
    for number in range(draw(st.integers(1, 30))):
        event = draw(st.sampled_from(EVENTS))
        state = event(draw, state, number)
        states.append(state)
    return states


def arrive(draw, state, number):
    prompt, priority = draw(st.integers(1, 100)), draw(st.integers(0, 1))
    job = draw(st.sampled_from("abcd"))
    return queue.arrive(state, request(f"r{number}", job, prompt, priority=priority))


def admit(draw, state, number):
    offered = queue.offer(state)
    if offered is None:
        return state
    former = state.find(offered.request_id)
    state = queue.take(state, offered.request_id)
    if draw(st.booleans()):
        return queue.put_back(state, former)
    running = [*(m.request for m in state.running), replace(offered, computed_tokens=1)]
    return queue.run(state, running)


def preempt(draw, state, number):
    if not state.running:
        return state
    return queue.preempt(state, draw(st.sampled_from(state.running)).request.request_id)


def end(draw, state, number):
    if not state.members:
        return state
    member = draw(st.sampled_from(state.members))
    decoded = replace(member.request, output_tokens=draw(st.integers(0, 200)))
    others = [m.request for m in state.running if m is not member]
    if member.phase is Phase.RUNNING:
        state = queue.run(state, [*others, decoded])
    return queue.end(state, member.request.request_id, draw(st.booleans()))


def resize(draw, state, number):
    return queue.resize(state, draw(st.integers(0, state.pool.usable_blocks)))


EVENTS = (arrive, arrive, arrive, admit, admit, preempt, end, resize)


@given(histories())
def test_every_state_satisfies_every_invariant(states):
    for state in states:
        assert invariants.broken(state) == []


@given(histories())
def test_q5_the_order_of_the_members_in_the_state_does_not_matter(states):
    state = states[-1]
    assert queue.offer(replace(state, members=state.members[::-1])) == queue.offer(state)


@st.composite
def systems(draw):
    """Systems too large to look at all of their histories."""
    usable = draw(st.integers(1, 12))
    pool = Pool(usable, usable, block_size=4, step_tokens=draw(st.sampled_from([3, 8, 100])))
    settings = Settings(
        max_jobs=draw(st.integers(0, 2)),
        reserve_margin_blocks=draw(st.integers(0, 3)),
        reserve_max_blocks=draw(st.integers(0, 4)),
        low_available_tokens_threshold=draw(st.sampled_from([0, 12, 4096])),
        short_decode_token_threshold=draw(st.sampled_from([1, 4])),
    )
    lengths = draw(st.lists(st.tuples(st.integers(1, 24), st.integers(1, 12)), min_size=1, max_size=12))
    requests = [
        Request(f"r{number}", draw(st.sampled_from("abcd")), prompt, most, priority=draw(st.integers(0, 1)))
        for number, (prompt, most) in enumerate(lengths)
    ]
    return model.begin(requests, pool, settings, draw(st.booleans()))


def after(system, event, following, everyone):
    """The system after an event, each of whose moments keeps the rules."""
    changes = [(system, following, {event.split()[-1]})]
    if event == "step":
        moments = pairwise([system, *model.moments(system)])
        changes = [(one, next_one, exhaustive.one_token_from_the_end(one)) for one, next_one in moments]
    for one, next_one, may_end in changes:
        faults = exhaustive.faults_of_a_change(one, next_one, may_end)
        assert faults + exhaustive.faults_of_a_state(next_one, everyone) == []
    return following


@given(systems(), st.data())
def test_p1_p3_p4_whole_batches_keep_the_rules_and_end(system, data):
    everyone = {request.request_id for request in system.absent}
    for _ in range(data.draw(st.integers(0, 40))):
        event, following = data.draw(st.sampled_from(list(exhaustive.events(system))))
        system = after(system, event, following, everyone)
    for request in system.absent:
        system = model.arrive(system, request.request_id)
    seen = set()
    while system.state.members:
        assert model.canonical(system) not in seen, "steps alone come back to this state"
        seen.add(model.canonical(system))
        system = after(system, "step", model.step(system), everyone)
    assert system.ended == everyone


# --- each invariant says no when it is broken ----------------------------------------------------------


@pytest.fixture
def state():
    state = queue.start(Pool(usable_blocks=10, free_blocks=10))
    for name in "ab":
        state = queue.arrive(state, request(name))
    return state


def test_a_doubled_request_is_noticed(state):
    doubled = replace(state, members=state.members + state.members[:1])
    assert not invariants.every_request_is_there_once(doubled)


def test_equal_places_in_the_order_are_noticed(state):
    first, second = state.members
    tied = replace(state, members=(first, replace(second, arrival=first.arrival)))
    assert not invariants.the_order_is_total(tied)


def test_an_offer_of_what_does_not_wait_is_noticed(state):
    assert not invariants.what_is_offered_waits(state, request("stranger"))


def test_an_offer_beyond_the_budget_is_noticed(state):
    running = replace(state.members[0].request, computed_tokens=1)
    large = request("large", prompt=10 * BLOCK)
    state = queue.arrive(queue.run(queue.take(state, "a"), [running]), large)
    assert not invariants.what_is_offered_fits(state, large)


def test_an_idle_queue_is_noticed(state):
    assert not invariants.nothing_that_fits_waits_behind_what_does_not(state, None)
    assert not invariants.an_idle_engine_is_offered_what_fits_the_empty_pool(state, None)


def test_an_offer_of_the_second_in_the_order_is_noticed(state):
    assert invariants.nothing_that_fits_comes_before_what_is_offered(state, request("a"))
    assert not invariants.nothing_that_fits_comes_before_what_is_offered(state, request("b"))


def test_too_many_jobs_are_noticed(state):
    crowded = replace(state, jobs=replace(state.jobs, max_jobs=1, tracked=state.jobs.tracked * 2))
    assert not invariants.jobs_stay_within_their_number(crowded)


def test_a_job_displaced_for_nothing_is_noticed(state):
    table = JobTable(max_jobs=5, tracked=state.jobs.tracked, displaced=("b",))
    displaced = replace(state, jobs=table)
    assert not invariants.a_job_is_displaced_only_while_every_place_is_live(displaced)


def test_a_displaced_default_job_is_noticed(state):
    displaced = replace(state, jobs=replace(state.jobs, displaced=(DEFAULT_JOB,)))
    assert not invariants.the_default_job_waits_for_no_place(displaced)


# --- events that have no meaning -----------------------------------------------------------------------


def test_a_request_arrives_once(state):
    with pytest.raises(DuplicateRequestError, match="'a' arrived twice"):
        queue.arrive(state, request("a"))


def test_only_what_waits_is_taken(state):
    with pytest.raises(WrongPhaseError, match="'z' is unknown, allowed: waiting"):
        queue.take(state, "z")
    with pytest.raises(WrongPhaseError, match="'a' is taken, allowed: waiting"):
        queue.take(queue.take(state, "a"), "a")


def test_only_what_ran_is_preempted(state):
    with pytest.raises(WrongPhaseError, match="'a' is waiting, allowed: taken or running"):
        queue.preempt(state, "a")


# --- rules that an example says best -------------------------------------------------------------------


def test_p1_what_fits_only_the_empty_pool_is_offered_to_an_idle_engine():
    state = queue.start(Pool(usable_blocks=4, free_blocks=1), Settings(reserve_margin_blocks=9))
    state = queue.arrive(state, request("a", prompt=4 * BLOCK))
    assert queue.offer(state).request_id == "a"


def test_p2_what_can_never_fit_is_not_offered_and_is_named():
    state = queue.start(Pool(usable_blocks=4, free_blocks=4))
    state = queue.arrive(state, request("giant", prompt=4 * BLOCK + 1))
    assert queue.offer(state) is None
    assert [r.request_id for r in queue.unservable(state)] == ["giant"]


def test_the_documented_defaults():
    assert Settings() == Settings(
        max_jobs=20,
        reserve_margin_blocks=2,
        reserve_max_blocks=8,
        low_available_tokens_threshold=4096,
        short_decode_token_threshold=32,
        ewma_alpha=0.1,
        look_ahead=True,
    )
