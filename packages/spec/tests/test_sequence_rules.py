"""The rules over sequences and strings, each against a second statement of the same rule.

These cannot be proved. They are searched twice: with random inputs among the unit tests, and by
CrossHair's solver, which looks for inputs that take other paths, in ``nox -s contracts``.
"""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from batchjob_spec import jobs, ordering
from batchjob_spec.jobs import DEFAULT_JOB, JobTable
from batchjob_spec.reservation import predicted_peak_tokens

# --- J1 ---------------------------------------------------------------------------------------------

PIECES = st.sampled_from(["#job_name[", "]#", "[", "]", "#", "job_name", "a", "新", "1"])


@given(st.lists(PIECES, max_size=12).map("".join) | st.text(max_size=20))
def test_j1_the_tag_is_the_first_match_of_a_regular_expression(request_id):
    match = re.search(r"#job_name\[([^\[\]]+)\]#", request_id)
    assert jobs.tagged_job(request_id) == (match[1] if match else None)


# --- J4 ---------------------------------------------------------------------------------------------


@given(st.lists(st.sampled_from("abcdef"), max_size=20), st.integers(1, 3))
def test_j4_no_number_of_jobs_exceeds_the_limit(arrivals, max_jobs):
    table = JobTable(max_jobs)
    for now, name in enumerate(arrivals):
        table = jobs.track(table, name, {name}, now)
        assert sum(job.name != DEFAULT_JOB for job in table.tracked) <= max_jobs


# --- V5 ---------------------------------------------------------------------------------------------

LONGEST = 8


HELD_AND_REMAINING = st.tuples(st.integers(0, 100), st.integers(1, LONGEST))


@given(st.lists(HELD_AND_REMAINING, max_size=3), HELD_AND_REMAINING)
def test_v5_the_peak_is_the_most_that_a_step_by_step_decode_holds(running, candidate):
    peak = 0
    for step in range(1, candidate[1] + 1):
        there = [held + step for held, remaining in [*running, candidate] if remaining >= step]
        peak = max(peak, sum(there))
    assert predicted_peak_tokens(running, candidate) == peak


# --- O0 to O5 ---------------------------------------------------------------------------------------

SMALL = st.integers(0, 3)
MEMBERS = st.fixed_dictionaries(
    {
        "kind": st.sampled_from(["preempted", "probe", "regular"]),
        "priority": SMALL,
        "preempted_at": SMALL,
        "rank": st.integers(0, 1),
        "predicted": st.integers(0, 300),
        "job_appeared": SMALL,
        "need": st.integers(0, 300),
        "arrival": SMALL,
    }
)
KEYS = {
    "preempted": (ordering.preempted_key, ("priority", "preempted_at")),
    "probe": (ordering.probe_key, ("priority", "arrival")),
    "regular": (
        ordering.regular_key,
        ("priority", "rank", "predicted", "job_appeared", "need", "arrival"),
    ),
}


def key(member):
    make_key, fields = KEYS[member["kind"]]
    return make_key(*(member[field] for field in fields))


DECIDED_BY = {
    "preempted": (("preempted_at", "least"),),
    "probe": (("arrival", "least"),),
    "regular": (
        ("rank", "least"),
        ("predicted", "greatest"),
        ("job_appeared", "least"),
        ("need", "greatest"),
        ("arrival", "least"),
    ),
}


def comes_first(one, other):
    """O0 to O5 in words: the priority, then the kind, then the first field in which they differ."""
    if one["priority"] != other["priority"]:
        return one["priority"] < other["priority"]
    if one["kind"] != other["kind"]:
        return one["kind"] == "preempted" or other["kind"] == "regular"
    for field, wins in DECIDED_BY[one["kind"]]:
        if one[field] != other[field]:
            return (one[field] < other[field]) == (wins == "least")
    return False


@given(MEMBERS, MEMBERS)
def test_o0_to_o5_the_lesser_key_is_the_one_that_the_rules_put_first(one, other):
    assert (key(one) < key(other)) == comes_first(one, other)
