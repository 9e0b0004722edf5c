"""The command that predicts how long a batch takes, as a user calls it."""

from __future__ import annotations

import json
import re
import sys

import pytest

from batchjob_testkit.simulator.command import main
from batchjob_testkit.simulator.profiles import PROFILES


@pytest.fixture
def lengths(tmp_path):
    file = tmp_path / "lengths.csv"
    rows = [f"news,2000,{10 + n}\nchat,200,{100 + 20 * n}\n" for n in range(10)]
    file.write_text("job,prompt_tokens,output_tokens\n" + "".join(rows))
    return file


@pytest.fixture
def predict(capsys):
    """Runs the command; returns what it prints."""

    def run(*arguments):
        main([str(argument) for argument in arguments])
        return capsys.readouterr().out

    return run


@pytest.fixture
def refused(capsys):
    """Runs the command, which must end with one line; returns it."""

    def run(*arguments):
        with pytest.raises(SystemExit) as error:
            main([str(argument) for argument in arguments])
        assert error.value.code == 2
        return capsys.readouterr().err.splitlines()[-1]

    return run


def figures(text, title):
    return re.findall(rf"^{title} +(.*)$", text, flags=re.MULTILINE)


def timings(text):
    return [line.split()[0] for line in figures(text, "timing")]


def test_it_predicts_the_makespan_under_both_timings(predict, lengths):
    text = predict(lengths, "--fake")
    assert text.startswith("20 requests of 2 jobs on h100: 25243 KV cache blocks of 16 tokens, up to 256")
    assert "a step: 2.00 ms, 5.99 ms for the weights, 27.1 µs a token, 48.9 ns a token of context" in text
    serial, overlap = (float(value.removesuffix(" s")) for value in figures(text, "makespan"))
    # The longest request has 280 steps, of at least 2 + 6 ms.
    assert 280 * 0.008 < overlap <= serial < 2 * 280 * 0.008
    assert timings(text) == ["serial", "overlap"]


def test_the_device_and_the_engine_can_be_chosen(predict, lengths):
    text = predict(
        *(lengths, "--fake", "--device", "ascend_910b", "--kv-cache-tokens", "3232", "--block-size", "32"),
        *("--max-num-seqs", "4", "--max-model-len", "3000", "--arrivals-per-second", "0.1"),
    )
    assert "on ascend_910b: 101 KV cache blocks of 32 tokens, up to 4 requests at once" in text
    makespan = float(figures(text, "makespan")[0].removesuffix(" s"))
    assert makespan > 190  # the last of 20 arrives then


def test_a_log_of_steps_makes_the_profile_and_chooses_the_timing(predict, lengths, tmp_path):
    log = tmp_path / "steps.csv"
    slow = PROFILES["ascend_910b"]
    rows = [
        (tokens, context, slow.step_seconds("overlap", tokens, context))
        for tokens in (1, 8, 64, 200, 1000, 4000, 8000)
        for context in (1000, 50_000, 200_000)
    ]
    log.write_text("tokens,context_tokens,seconds\n" + "".join(f"{a},{b},{c}\n" for a, b, c in rows))
    fitted = predict(lengths, "--fake", "--profile-log", log)
    assert "on the device of steps.csv" in fitted
    assert timings(fitted) == ["overlap"]
    known = predict(lengths, "--fake", "--device", "ascend_910b")
    assert figures(fitted, "makespan") == figures(known, "makespan")[1:]


def test_a_batch_file_takes_lengths_from_answers_or_means(predict, tmp_path):
    batch, answers = tmp_path / "input.jsonl", tmp_path / "output.jsonl"
    body = {"messages": [{"role": "user", "content": "Hello"}], "request_id": "#job_name[news]#1"}
    batch.write_text(json.dumps({"custom_id": "1", "body": body}) + "\n")
    usage = {"prompt_tokens": 10, "completion_tokens": 500}
    answers.write_text(json.dumps({"custom_id": "1", "response": {"body": {"usage": usage}}}) + "\n")
    seconds = float(figures(predict(batch, "--fake", "--answers", answers), "makespan")[0].removesuffix(" s"))
    assert seconds == pytest.approx(500 * 0.008, rel=0.01)
    text = predict(batch, "--fake", "--output-tokens", "news=100", "--output-spread", "0")
    assert float(figures(text, "makespan")[0].removesuffix(" s")) == pytest.approx(100 * 0.008, abs=0.051)


def test_what_is_wrong_ends_it_with_one_line(refused, lengths, tmp_path):
    empty = tmp_path / "empty.csv"
    empty.write_text("prompt_tokens,output_tokens\n")
    assert refused(empty, "--fake").endswith("empty.csv: no request, allowed: at least one")
    too_long = "prompt_tokens 2000 + output_tokens 10 is 2010, allowed: up to max_model_len 250"
    assert f"lengths.csv:2: {too_long}" in refused(lengths, "--fake", "--max-model-len", "250")
    assert "No such file or directory: 'nowhere.csv'" in refused("nowhere.csv", "--fake")
    assert "--output-tokens: got '=5', allowed: JOB=MEAN" in refused(lengths, "--output-tokens", "=5")
    assert "--additional-config: got '[]', allowed: a JSON" in refused(lengths, "--additional-config", "[]")
    assert "--scheduler is 'x.Y', allowed: none with --fake" in refused(
        lengths, "--fake", "--scheduler", "x.Y"
    )
    assert "stores 2009 tokens, allowed: up to the 1600" in refused(
        lengths, "--fake", "--kv-cache-tokens", "1600"
    )


def test_without_a_plotting_library_a_plot_is_refused_with_the_remedy(refused, lengths, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    message = refused(lengths, "--fake", "--plot", "batch.svg")
    assert message.endswith(
        "matplotlib is missing, which draws the plots: pip install 'batchjob-testkit[plot]'"
    )


def test_without_vllm_the_fake_engine_is_named(refused, lengths, monkeypatch):
    monkeypatch.setitem(sys.modules, "batchjob_testkit.simulator.vllm_backend", None)
    assert refused(lengths).endswith("without vLLM only --fake works")
