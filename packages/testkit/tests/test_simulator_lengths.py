"""Files of lengths: what is read, and what is refused with its place."""

from __future__ import annotations

import json
from statistics import fmean

import pytest

from batchjob_testkit.simulator.lengths import TRACES, LengthsError, read_batch, read_csv, read_trace
from batchjob_testkit.workloads import Workload, WorkloadRequest


@pytest.fixture
def csv_of(tmp_path):
    def write(text):
        file = tmp_path / "lengths.csv"
        file.write_text(text, encoding="utf-8")
        return file

    return write


@pytest.fixture
def lines_of(tmp_path):
    def write(name, *lines):
        file = tmp_path / name
        file.write_text(
            "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
        )
        return file

    return write


@pytest.mark.parametrize("name", TRACES)
def test_a_public_trace_is_one_job_that_the_model_can_serve(name):
    requests = read_trace(name)
    assert len(requests) == 1000
    assert {request.job for request in requests} == {name}
    Workload(8192, tuple(requests))


def test_the_traces_are_four_kinds_of_work():
    means = {name: fmean(request.output_tokens for request in read_trace(name)) for name in TRACES}
    # The means of the whole traces are 28, 291, 1613 and 439.
    assert means == {
        "azure_code": pytest.approx(28, rel=0.25),
        "arxiv_summarization": pytest.approx(291, rel=0.25),
        "book_translation": pytest.approx(1613, rel=0.05),
        "sharegpt": pytest.approx(439, rel=0.05),
    }


def test_a_csv_names_jobs_caps_and_prefixes_if_it_wants(csv_of):
    file = csv_of(
        "job,prompt_tokens,output_tokens,max_tokens,prefix_tokens\nnews,10,5,8,4\n,10,5,,\n",
    )
    assert read_csv(file, max_model_len=100) == [
        WorkloadRequest("news", 10, 5, max_tokens=8, prefix_tokens=4),
        WorkloadRequest("__default__", 10, 5),
    ]


HEAD = "prompt_tokens,output_tokens,max_tokens,prefix_tokens\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "prompt_tokens,length\n1,2\n",
            "lengths.csv:1: columns prompt_tokens, length, allowed: prompt_tokens",
        ),
        ("", "lengths.csv:1: columns none, allowed: prompt_tokens and output_tokens"),
        (f"{HEAD}5,5,,\n0,5,,\n", "lengths.csv:3: prompt_tokens is '0', allowed: an integer of at least 1"),
        (f"{HEAD}5,-1,,\n", "lengths.csv:2: output_tokens is '-1', allowed: an integer of at least 1"),
        (f"{HEAD}5,many,,\n", "lengths.csv:2: output_tokens is 'many', allowed: an integer of at least 1"),
        (f"{HEAD}5\n", "lengths.csv:2: output_tokens is None, allowed: an integer of at least 1"),
        (f"{HEAD}5,5,0,\n", "lengths.csv:2: max_tokens is '0', allowed: an integer of at least 1"),
        (f"{HEAD}5,5,,-1\n", "lengths.csv:2: prefix_tokens is '-1', allowed: an integer of at least 0"),
        (
            f"{HEAD}60,41,,\n",
            r"lengths.csv:2: prompt_tokens 60 \+ output_tokens 41 is 101, allowed: up to max_model_len 100",
        ),
        (
            f"{HEAD}60,1,41,\n",
            r"lengths.csv:2: prompt_tokens 60 \+ max_tokens 41 is 101, allowed: up to max_model_len 100",
        ),
        (f"{HEAD}5,5,4,\n", "lengths.csv:2: max_tokens is 4, allowed: at least output_tokens 5"),
        (f"{HEAD}5,5,,6\n", "lengths.csv:2: prefix_tokens is 6, allowed: 0 to prompt_tokens 5"),
    ],
)
def test_wrong_lengths_are_refused_with_their_place(csv_of, text, message):
    with pytest.raises(LengthsError, match=message):
        read_csv(csv_of(text), max_model_len=100)


def line(custom_id, content="Hello, world", **body):
    body = {"messages": [{"role": "user", "content": content}], **body}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}


def answer(custom_id, prompt, completion):
    usage = {"prompt_tokens": prompt, "completion_tokens": completion}
    return {"custom_id": custom_id, "response": {"body": {"usage": usage}}, "error": None}


def test_a_batch_takes_its_lengths_from_the_answers_of_an_earlier_run(lines_of):
    batch = lines_of(
        "input.jsonl",
        line("1", request_id="#job_name[news]#1", max_tokens=8),
        "",
        line("2", vllm_xargs={"job_name": "labels"}),
    )
    answers = lines_of("output.jsonl", answer("2", 30, 3), answer("1", 20, 7))
    assert read_batch(batch, max_model_len=100, answers=answers) == [
        WorkloadRequest("news", 20, 7, max_tokens=8),
        WorkloadRequest("labels", 30, 3),
    ]


def test_prompts_are_estimated_from_all_text_at_four_characters_a_token(lines_of):
    parts = [{"type": "text", "text": "x" * 60}, {"type": "image_url", "image_url": {"url": "x" * 100}}]
    batch = lines_of(
        "input.jsonl", line("1", "x" * 40), line("2", parts), {"body": {"prompt": ["x" * 20, "x" * 60]}}
    )
    requests = read_batch(batch, max_model_len=100, job_output_tokens={"*": 5})
    assert [request.prompt_tokens for request in requests] == [10, 15, 20]


def test_outputs_are_drawn_around_the_mean_of_their_job(lines_of):
    names = ["news", "labels"] * 500
    batch = lines_of("input.jsonl", *(line(n, request_id=f"#job_name[{n}]#") for n in names))
    means = {"news": 300, "*": 10}
    requests = read_batch(batch, max_model_len=8192, job_output_tokens=means, output_spread=0.5)
    for job, mean in (("news", 300), ("labels", 10)):
        drawn = [request.output_tokens for request in requests if request.job == job]
        assert fmean(drawn) == pytest.approx(mean, rel=0.1)
        assert len(set(drawn)) > 5


def test_a_drawn_output_keeps_its_cap_and_the_models_maximum(lines_of):
    batch = lines_of("input.jsonl", line("1", max_tokens=7), line("2"))
    requests = read_batch(batch, max_model_len=50, job_output_tokens={"*": 10_000})
    assert [request.output_tokens for request in requests] == [7, 47]
    assert [request.finish_reason for request in requests] == ["length", "stop"]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("{", "input.jsonl:2: no JSON"),
        ("[]", "input.jsonl:2: list, allowed: an object on each line"),
        ({"custom_id": "x"}, "input.jsonl:2: body is None, allowed: an object"),
        (
            line("x", request_id="#job_name[odd]#"),
            "input.jsonl:2: nothing says how long .* 'x' .job 'odd'. is",
        ),
        (line("x", "x" * 500, request_id="#job_name[news]#"), "input.jsonl:2: prompt_tokens 125 .* is 126"),
    ],
)
def test_a_wrong_line_of_a_batch_is_refused_with_its_place(lines_of, wrong, message):
    batch = lines_of("input.jsonl", line("1", request_id="#job_name[news]#"), wrong)
    with pytest.raises(LengthsError, match=message):
        read_batch(batch, max_model_len=100, job_output_tokens={"news": 10})


def test_wrong_usage_in_the_answers_is_refused(lines_of):
    batch, answers = lines_of("input.jsonl", line("1")), lines_of("output.jsonl", answer("1", 0, 5))
    with pytest.raises(LengthsError, match=r"output.jsonl:1: usage.prompt_tokens is 0, allowed: an integer"):
        read_batch(batch, max_model_len=100, answers=answers)
