"""All histories of small systems keep the rules, and a broken rule is found in them."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from batchjob_spec import model, queue

sys.path.insert(0, str(Path(__file__).parent))
import exhaustive  # the script beside this file


@pytest.mark.parametrize("name", exhaustive.QUICK)
def test_all_histories_of_a_small_system_keep_the_rules_and_end(name):
    explored = exhaustive.explore(exhaustive.QUICK[name])
    assert explored.states > 1_000, f"{explored}: so few cannot be all"


def test_look_ahead_slots_keep_no_request_waiting_for_ever():
    exhaustive.explore(exhaustive.small_system((3, 2), lookahead_tokens=1))


# --- broken specifications ----------------------------------------------------------------------------


def preempt_loses_the_request(state, name):
    return replace(state, members=tuple(m for m in state.members if m.request.request_id != name))


def preempt_forgets_to_hold_back(state, name, preempt=queue.preempt):
    state = preempt(state, name)
    return replace(state, members=tuple(replace(m, held_back=False) for m in state.members))


def the_margin_counts_while_nothing_runs(state):
    return (queue.budget_tokens(state),)


def whatever_waits_is_unservable(state):
    return tuple(member.request for member in state.waiting)


def nothing_is_unservable(state):
    return ()


def nothing_is_offered(state):
    return None


def nothing_is_held_back(state, member):
    return False


def the_last_one_is_offered(state, offer=queue.offer):
    candidates = queue.admissible(state, queue.budget_tokens(state))
    return candidates[-1].request if candidates else offer(state)


LARGE = exhaustive.small_system((3, 3), (2, 2), (5, 1))
CROWDED = exhaustive.small_system((1, 4), (1, 4), settings=exhaustive.NO_RESERVE)


@pytest.mark.parametrize(
    ("name", "broken", "system", "rule"),
    [
        ("preempt", preempt_loses_the_request, LARGE, "P3"),
        ("preempt", preempt_forgets_to_hold_back, LARGE, "P4"),
        ("is_held_back", nothing_is_held_back, CROWDED, "P4"),
        ("budgets", the_margin_counts_while_nothing_runs, LARGE, "an_idle_engine_is_offered_what_fits"),
        ("unservable", whatever_waits_is_unservable, LARGE, "P3"),
        ("unservable", nothing_is_unservable, LARGE, "steps alone come back"),
        ("offer", nothing_is_offered, LARGE, "nothing_that_fits_waits_behind"),
        ("offer", the_last_one_is_offered, LARGE, "nothing_that_fits_comes_before_what_is_offered"),
    ],
)
def test_a_broken_specification_is_found_with_its_history(monkeypatch, name, broken, system, rule):
    monkeypatch.setattr(queue, name, broken)
    with pytest.raises(AssertionError, match=rf"{rule}.*\n  history: "):
        exhaustive.explore(system)


# --- what is not promised -------------------------------------------------------------------------------


def test_a_request_may_wait_for_ever_while_preferred_ones_keep_arriving():
    """The same state comes back with the same request still waiting, so this can go on without end."""
    long = queue.Request("long", "summaries", prompt_tokens=2, max_tokens=2)
    short = queue.Request("short", "labels", prompt_tokens=2, max_tokens=1)
    settings = replace(exhaustive.SETTINGS, short_decode_token_threshold=1, low_available_tokens_threshold=0)
    system = model.begin((), queue.Pool(4, 4, block_size=1), settings)

    def arrives(system, request):
        return model.arrive(replace(system, absent=(request,)), request.request_id)

    for request in (long, short) * 3:  # both jobs are learnt
        system = model.step(model.step(arrives(system, request)))
    waiting = arrives(model.step(arrives(system, long)), short)
    states = set()
    for _ in range(5):
        waiting = model.step(waiting)
        waiting = model.step(arrives(waiting, long))
        assert waiting.state.find("short").phase is queue.Phase.WAITING
        states.add(model.canonical(waiting))
    assert len(states) == 1
