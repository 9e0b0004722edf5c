"""All histories of small systems: every state that any order of events reaches is looked at.

Run as a script for the larger systems: ``python packages/spec/tests/exhaustive.py``. It prints how
many states each one has. The quick ones run with the unit tests.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

from batchjob_spec import invariants, model, queue
from batchjob_spec.model import System
from batchjob_spec.queue import Phase, Pool, Request, Settings

History = dict[System, tuple[System, str] | None]
"""For each state the one before it and the event between them, on a shortest way from the start."""


@dataclass(frozen=True)
class Explored:
    states: int
    events: int
    longest_run: int  # engine steps from any state until nothing is in the system

    def __str__(self) -> str:
        return f"{self.states} states, {self.events} events, at most {self.longest_run} steps to the end"


def events(system: System) -> Iterator[tuple[str, System]]:
    """Everything that may happen next, by name."""
    yield "step", model.step(system)
    for request in system.absent:
        name = request.request_id
        yield f"arrive {name}", model.arrive(system, name)
    for member in system.state.members:
        name = member.request.request_id
        yield f"abort {name}", model.abort(system, name)
        if member.phase is Phase.RUNNING and member.request.output_tokens:
            yield f"stop {name}", model.stop(system, name)
        if member.phase is Phase.RUNNING:
            yield f"preempt {name}", model.preempt(system, name)


def explore(start: System) -> Explored:
    """Look at every state within reach of ``start``; a broken rule is shown with the shortest history."""
    everyone = {request.request_id for request in start.absent}
    start = model.canonical(start)
    came_from: History = {start: None}
    step_from: dict[System, System] = {}
    followed = 0
    frontier = [start]
    for system in frontier:
        for before, moment in pairwise(within_a_step(system)):
            faults = faults_of_a_state(moment, everyone)
            faults += faults_of_a_change(before, moment, one_token_from_the_end(before))
            assert not faults, shown(faults, system, "step", came_from)
        for event, after in events(system):
            faults = faults_of_a_state(after, everyone)
            if event != "step":
                faults += faults_of_a_change(system, after, {event.split()[-1]})
            assert not faults, shown(faults, system, event, came_from)
            after = model.canonical(after)
            followed += 1
            if event == "step":
                step_from[system] = after
            if after not in came_from:
                came_from[after] = (system, event)
                frontier.append(after)
    return Explored(len(came_from), followed, longest_run(step_from, came_from))


def faults_of_a_state(system: System, everyone: set[str]) -> list[str]:
    """The rules that a state breaks; P3 and the blocks are counted by the engine, not by the queue."""
    faults = invariants.broken(system.state)
    absent = [request.request_id for request in system.absent]
    present = [member.request.request_id for member in system.state.members]
    if sorted([*absent, *present, *system.ended]) != sorted(everyone):
        faults.append("P3: a request is lost or in two places")
    if sorted(m.request.request_id for m in system.state.running) != sorted(system.running):
        faults.append("the queue and the engine disagree on what runs")
    if not 0 <= system.free_blocks == system.state.pool.free_blocks:
        faults.append("a block is lost or handed out twice")
    return faults


def faults_of_a_change(before: System, after: System, may_end: set[str]) -> list[str]:
    """P3 and P4: only ``may_end`` end, and what was preempted comes back when there is room for it."""
    faults = []
    ended = after.ended - before.ended
    if not ended <= may_end:
        faults.append(f"P3: {sorted(ended - may_end)} ended for no reason")
    for member in after.state.members:
        name = member.request.request_id
        if not ended and name in before.running and member.preempted_at is not None and not member.held_back:
            faults.append(f"P4: {name} was preempted and is not held back")
    admitted = set(after.running) - set(before.running)
    back = [name for name in admitted if before.running and before.state.find(name).held_back]
    crowded = [name for name in back if peak_tokens(before, name) > queue.attainable_tokens(before.state)]
    if crowded:
        faults.append(f"P4: {crowded} came back without room at the predicted peak")
    return faults


def capacity(system: System) -> int:
    return system.state.pool.usable_blocks * system.state.pool.block_size


def peak_tokens(system: System, candidate: str) -> int:
    """V5 for what runs and the candidate, by letting all of them decode step by step until it ends."""
    size = system.state.pool.block_size
    members = [system.state.find(name) for name in (*system.running, candidate)]
    lengths = [
        (-(-member.request.known_tokens // size) * size, queue.remaining_tokens(system.state, member))
        for member in members
    ]
    _, until = lengths[-1]
    return max(
        sum(held + step for held, remaining in lengths if remaining >= step) for step in range(1, until + 1)
    )


def within_a_step(system: System) -> Iterator[System]:
    yield system
    yield from model.moments(system)


def one_token_from_the_end(system: System) -> set[str]:
    """Those that a step may end: their next token is their last, or they fit no pool (P2)."""
    requests = [member.request for member in system.state.members]
    capped = {r.request_id for r in requests if r.output_tokens + 1 == r.max_tokens}
    return capped | {r.request_id for r in requests if r.known_tokens > capacity(system)}


def longest_run(step_from: dict[System, System], came_from: History) -> int:
    """Termination: engine steps alone lead from every state to one with nothing in the system.

    A step is the only event that can be repeated for ever, since each of the others uses a request
    up, but for a preemption, of which a batch sees finitely many. So no history goes on without end
    if no sequence of steps does.
    """
    to_the_end: dict[System, int] = {}
    for start in step_from:
        system = start
        path: list[System] = []
        on_path: set[System] = set()
        while system.state.members and system not in to_the_end:
            circle = ["P1 or P4: steps alone come back to this state"]
            assert system not in on_path, shown(circle, system, "step", came_from)
            path.append(system)
            on_path.add(system)
            system = step_from[system]
        steps = to_the_end.get(system, 0)
        for passed in reversed(path):
            steps += 1
            to_the_end[passed] = steps
    return max(to_the_end.values(), default=0)


def shown(faults: list[str], system: System, event: str, came_from: History) -> str:
    """What is broken, with the shortest history that breaks it and the state before its last event."""
    history = [event]
    link = came_from[system]
    while link is not None:
        history.append(link[1])
        link = came_from[link[0]]
    return f"{'; '.join(faults)}\n  history: {', '.join(reversed(history))}\n  before: {system}"


# --- the systems ------------------------------------------------------------------------------------

SETTINGS = Settings(
    max_jobs=2,  # one fewer than there are jobs
    reserve_margin_blocks=1,
    reserve_max_blocks=2,
    low_available_tokens_threshold=4,
    short_decode_token_threshold=2,
    ewma_alpha=0.5,
)


def small_system(
    *lengths: tuple[int, int],
    block_size: int = 1,
    step_tokens: int = 2,
    lookahead_tokens: int = 0,
    settings: Settings = SETTINGS,
) -> System:
    """Four blocks, and requests of jobs a, b, c in turn: (prompt, most output), in tokens."""
    jobs = "abca"
    requests = (
        Request(f"{jobs[i]}{i}", jobs[i], prompt, max_tokens)
        for i, (prompt, max_tokens) in enumerate(lengths)
    )
    pool = Pool(4, 4, block_size, step_tokens, lookahead_tokens)
    return model.begin(requests, pool, settings)


# Nothing is kept free for what runs, so P4 alone stands between a preempted request and its next preemption.
NO_RESERVE = replace(SETTINGS, reserve_margin_blocks=0, reserve_max_blocks=0)

QUICK = {
    "a reserve": small_system((4, 2), (2, 1), (3, 1), (1, 2)),
    "no reserve": small_system((1, 4), (1, 4), (1, 1), settings=NO_RESERVE),
}

LARGER = {
    "blocks of two tokens": small_system((5, 3), (3, 1), (7, 3), (2, 4), block_size=2, step_tokens=4),
    "whole prompts in one step": small_system((3, 3), (2, 2), (4, 1), (1, 3), step_tokens=8),
    "no reserve, a place for each job": small_system(
        (3, 2), (1, 3), (1, 2), (2, 2), settings=replace(NO_RESERVE, max_jobs=0)
    ),
}


def main() -> int:
    """Explore the larger systems and print how many states each has."""
    for name, system in {**QUICK, **LARGER}.items():
        print(f"{name}: {explore(system)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
