"""Rules J1 to J3 in production, against the specification's own reading of a request ID."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import batchjob_spec.jobs as spec
from batchjob_scheduler.jobs import job_name
from batchjob_testkit.fakes import FakeRequest, FakeSamplingParams

# Pieces of which IDs with whole, broken, nested, empty and repeated tags are made.
PIECES = st.sampled_from(["#job_name[", "]#", "[", "]", "#", "job_name", "a", "新", "req_001", " "])


def request(request_id, extra_args=None):
    return FakeRequest(request_id, 1, 1, sampling_params=FakeSamplingParams(extra_args=extra_args))


@given(st.lists(PIECES, max_size=12).map("".join) | st.text(max_size=40))
@example("#job_name[]#job_name[a]#")
@example("#job_name[a]##job_name[b]#")
@example("#job_name[a[b]#")
@example("#job_name[\n]#")
def test_both_read_the_same_job_from_any_id(request_id):
    assert job_name(request(request_id)) == spec.job_name(request_id)


@pytest.mark.parametrize(
    ("request_id", "job"),
    [
        ("#job_name[job_A]#req_001", "job_A"),
        ("req_001#job_name[my_batch_job]#", "my_batch_job"),
        ("chatcmpl-#job_name[job_A]#req_001-5f3ab2c4", "job_A"),
        ("0_chatcmpl-#job_name[D]#n2-5f3ab2c4", "D"),
        ("embd-#job_name[E]#e2-1-5f3ab2c4", "E"),
        ("#job_name[新闻]#1", "新闻"),
        ("#job_name[a]##job_name[b]#", "a"),
        ("#job_name[broken#1", "__default__"),
        ("#job_name[]#1", "__default__"),
        ("req_001", "__default__"),
        ("", "__default__"),
    ],
)
def test_the_tag_survives_what_the_engine_adds(request_id, job):
    assert job_name(request(request_id)) == job


@pytest.mark.parametrize("ignored", [None, "", 5, ["news"], {"a": 1}])
def test_only_a_non_empty_string_wins_over_the_tag(ignored):
    assert job_name(request("#job_name[tag]#", {"job_name": ignored})) == "tag"
    assert job_name(request("#job_name[tag]#", {"job_name": "named"})) == "named"


def test_a_request_without_sampling_parameters_has_a_job():
    pooling = FakeRequest("embd-#job_name[E]#1", 1, 1, sampling_params=None)
    assert job_name(pooling) == "E"
