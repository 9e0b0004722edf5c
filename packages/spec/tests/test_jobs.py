"""Rules J2 to J4 of the specification; J1 is among the sequence rules."""

from __future__ import annotations

import pytest

from batchjob_spec.jobs import DEFAULT_JOB, JobTable, job_name, settle, track


@pytest.mark.parametrize(
    ("request_id", "extra_args", "job"),
    [
        ("#job_name[tag]#", {"job_name": "named"}, "named"),
        ("#job_name[tag]#", {"job_name": ""}, "tag"),
        ("#job_name[tag]#", {"job_name": 5}, "tag"),
        ("#job_name[tag]#", None, "tag"),
        ("1", {"job_name": "named"}, "named"),
        ("1", {}, DEFAULT_JOB),
    ],
)
def test_j2_j3_arguments_before_tag_before_default(request_id, extra_args, job):
    assert job_name(request_id, extra_args) == job


def names(table):
    return [job.name for job in table.tracked]


def test_j4_the_least_recently_used_idle_job_gives_up_its_place():
    table = JobTable(max_jobs=2)
    table = track(table, "a", {"a"}, now=0)
    table = track(table, "b", {"a", "b"}, now=1)
    assert names(track(table, "c", {"c"}, now=2)) == ["b", "c"]
    assert names(track(table, "c", {"a", "c"}, now=2)) == ["a", "c"]


def test_j4_without_an_idle_job_the_new_one_shares_the_default_job_until_a_place_is_free():
    table = track(JobTable(max_jobs=1), "a", {"a"}, now=0)
    table = track(table, "b", {"a", "b"}, now=1)
    assert table.displaced == ("b",)
    assert table.placed("b").name == DEFAULT_JOB
    table, promoted = settle(table, live={"b"}, now=2)
    assert promoted == ("b",)
    assert table.placed("b").name == "b"
    assert table.find("a") is None


def test_j4_a_displaced_name_without_requests_is_forgotten():
    table = track(JobTable(max_jobs=1), "a", {"a"}, now=0)
    table = track(table, "b", {"a", "b"}, now=1)
    table, promoted = settle(table, live={"a"}, now=2)
    assert (table.displaced, promoted) == ((), ())
