"""The command ``batchjob report``."""

from __future__ import annotations

import json

import pytest

from batchjob_scheduler.cli import main
from batchjob_scheduler.report import JobReport, Report


def answer(custom_id, *reasons, tokens=7):
    choices = [{"index": i, "finish_reason": reason} for i, reason in enumerate(reasons)]
    body = {"choices": choices, "usage": {"completion_tokens": tokens}}
    return {"custom_id": custom_id, "response": {"status_code": 200, "body": body}, "error": None}


def refusal(custom_id, message):
    error = {"error": {"message": message, "code": 400}}
    return {"custom_id": custom_id, "response": {"status_code": 400, "body": None}, "error": error}


@pytest.fixture
def output(tmp_path):
    def write(*lines):
        path = tmp_path / "output.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        return path

    return write


def rows(text):
    return [line.split() for line in text.splitlines() if line.strip()]


def test_each_request_with_its_finish_reason_and_length(output, capsys):
    path = output(answer("#job_name[a]#1", "stop"), answer("#job_name[新闻]#2", "length", tokens=64))
    assert main(["report", str(path)]) == 0
    printed = rows(capsys.readouterr().out)
    assert ["#job_name[a]#1", "stop", "7"] in printed
    assert ["#job_name[新闻]#2", "length", "64"] in printed


def test_each_choice_of_a_request_with_several(output, capsys):
    main(["report", str(output(answer("pair", "stop", "length")))])
    printed = rows(capsys.readouterr().out)
    assert ["pair", "[0]", "stop", "7"] in printed
    assert ["pair", "[1]", "length"] in printed


def test_an_error_is_shown_with_its_message(output, capsys):
    main(["report", str(output(refusal("giant", "needs 12 blocks, the pool has 10")))])
    expected = ["giant", "error:", "needs", "12", "blocks,", "the", "pool", "has", "10"]
    assert expected in rows(capsys.readouterr().out)


def test_what_the_scheduler_saw_per_job(tmp_path, capsys):
    path = tmp_path / "report.json"
    job = JobReport("a", 9, 8, 7, 62.54, 58, 3, 412)
    unobserved = JobReport("b", 1, 1, 0, None, 128, 0, 5)
    Report(500, 2, (job, unobserved)).write(path)
    assert main(["report", "--jobs", str(path)]) == 0
    printed = capsys.readouterr().out
    assert ["a", "9", "8", "7", "62.5", "58", "3", "412"] in rows(printed)
    assert ["b", "1", "1", "0", "-", "128", "0", "5"] in rows(printed)
    assert "500 steps in all, 2 jobs gave up their place" in printed


@pytest.mark.parametrize("content", ["not JSON", '{"custom_id": '])
def test_a_broken_file_is_named_with_its_line(tmp_path, capsys, content):
    path = tmp_path / "output.jsonl"
    path.write_text(json.dumps(answer("a", "stop")) + "\n" + content, encoding="utf-8")
    assert main(["report", str(path)]) == 1
    assert f"{path}, line 2 is not JSON" in capsys.readouterr().err


def test_a_missing_file_is_one_line(tmp_path, capsys):
    assert main(["report", str(tmp_path / "nowhere.jsonl")]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("batchjob: ")
    assert "nowhere.jsonl" in line
