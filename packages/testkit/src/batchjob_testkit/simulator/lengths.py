"""The lengths of a batch from files: traces, a user's CSV, or a batch as it is sent to the engine."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib import resources
from pathlib import Path
from random import Random
from typing import Any, Final

from batchjob_spec.jobs import job_name
from batchjob_testkit.workloads import WorkloadRequest

COLUMNS: Final = ("prompt_tokens", "output_tokens")
OPTIONAL_COLUMNS: Final = ("job", "max_tokens", "prefix_tokens")

TRACES: Final = ("azure_code", "arxiv_summarization", "book_translation", "sharegpt")
"""The public traces that come with the testkit, 1,000 requests of each."""

CHARACTERS_PER_TOKEN: Final = 4
"""An estimate for English text, where no tokenizer is at hand."""


class LengthsError(ValueError):
    """A file of lengths is wrong; the message says file, line, value and what is allowed."""


def read_trace(name: str) -> list[WorkloadRequest]:
    """The requests of a public trace, as one job of its name."""
    with resources.as_file(resources.files("batchjob_testkit") / "traces" / f"{name}.csv") as path:
        return [replace(request, job=name) for request in read_csv(path, max_model_len=8192)]


def read_csv(path: Path, *, max_model_len: int) -> list[WorkloadRequest]:
    """The requests of a CSV file: a line each with at least ``prompt_tokens`` and ``output_tokens``.

    Raises:
        LengthsError: if a column is missing, or a length is none, below 1 or over the model's maximum.
    """
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        columns = reader.fieldnames or []
        if not set(COLUMNS) <= set(columns):
            raise LengthsError(
                f"{path}:1: columns {', '.join(columns) or 'none'}, allowed: {' and '.join(COLUMNS)}, "
                f"and if wanted {', '.join(OPTIONAL_COLUMNS)}"
            )
        return [
            _checked(_request(cells, f"{path}:{reader.line_num}"), f"{path}:{reader.line_num}", max_model_len)
            for cells in reader
        ]


def read_batch(
    path: Path,
    *,
    max_model_len: int,
    answers: Path | None = None,
    job_output_tokens: Mapping[str, float] | None = None,
    output_spread: float = 0.5,
    seed: int = 0,
) -> list[WorkloadRequest]:
    """The requests of a batch file in the OpenAI format, as ``run-batch`` takes it.

    Lengths come from ``answers``, the output file of an earlier run, by ``custom_id``. Without it a prompt
    is estimated from its characters, and outputs are drawn from a log-normal distribution: its mean is
    ``job_output_tokens`` of the job (``*`` is any other job), its logarithm deviates by ``output_spread``.

    Raises:
        LengthsError: if a line is no request, or an output length is unknown or impossible.
    """
    usage = {} if answers is None else dict(_usage(answers))
    means = job_output_tokens or {}
    generator = Random(seed)
    requests = []
    for where, line in _json_lines(path):
        body = line.get("body")
        if not isinstance(body, dict):
            raise LengthsError(f"{where}: body is {body!r}, allowed: an object, the request that is sent")
        job = job_name(str(body.get("request_id", "")), _mapping(body.get("vllm_xargs")))
        custom_id = str(line.get("custom_id"))
        max_tokens = body.get("max_completion_tokens", body.get("max_tokens"))
        if custom_id in usage:
            prompt, output = usage[custom_id]
        else:
            prompt = max(1, round(_characters(body) / CHARACTERS_PER_TOKEN))
            mean = means.get(job, means.get("*"))
            if mean is None:
                raise LengthsError(
                    f"{where}: nothing says how long the answer of {custom_id!r} (job {job!r}) is, allowed: "
                    f"the answers of an earlier run, or the mean of the job's output tokens"
                )
            drawn = generator.lognormvariate(math.log(mean) - output_spread**2 / 2, output_spread)
            longest = max_model_len - prompt if max_tokens is None else max_tokens
            output = max(1, min(round(drawn), longest))
        requests.append(_checked(WorkloadRequest(job, prompt, output, max_tokens), where, max_model_len))
    return requests


def _request(cells: Mapping[str, str], where: str) -> WorkloadRequest:
    numbers: dict[str, int | None] = {}
    for name in ("prompt_tokens", "output_tokens", "max_tokens", "prefix_tokens"):
        text = cells.get(name)
        least = 0 if name == "prefix_tokens" else 1
        if text in (None, "") and name not in COLUMNS:
            numbers[name] = None
            continue
        try:
            numbers[name] = int(text or "")
        except ValueError:
            numbers[name] = -1
        if (numbers[name] or 0) < least:
            raise LengthsError(f"{where}: {name} is {text!r}, allowed: an integer of at least {least}")
    return WorkloadRequest(
        cells.get("job") or "__default__",
        numbers["prompt_tokens"] or 0,
        numbers["output_tokens"] or 0,
        numbers["max_tokens"],
        numbers["prefix_tokens"] or 0,
    )


def _checked(request: WorkloadRequest, where: str, max_model_len: int) -> WorkloadRequest:
    fault = request.fault(max_model_len)
    if fault is not None:
        raise LengthsError(f"{where}: {fault}")
    return request


def _usage(path: Path) -> Iterator[tuple[str, tuple[int, int]]]:
    """The prompt and output tokens of each answered request, by ``custom_id``."""
    for where, line in _json_lines(path):
        body = _mapping(_mapping(line.get("response")).get("body"))
        usage = _mapping(body.get("usage"))
        if not usage:
            continue  # it failed, so its lengths are as unknown as before
        lengths = []
        for name in ("prompt_tokens", "completion_tokens"):
            tokens = usage.get(name)
            if not (isinstance(tokens, int) and tokens >= 1):
                raise LengthsError(f"{where}: usage.{name} is {tokens!r}, allowed: an integer of at least 1")
            lengths.append(tokens)
        yield str(line.get("custom_id")), (lengths[0], lengths[1])


def _json_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with path.open(encoding="utf-8") as file:
        for number, text in enumerate(file, 1):
            if not text.strip():
                continue
            where = f"{path}:{number}"
            try:
                line = json.loads(text)
            except ValueError as error:
                raise LengthsError(f"{where}: no JSON ({error}), allowed: an object on each line") from None
            if not isinstance(line, dict):
                raise LengthsError(f"{where}: {type(line).__name__}, allowed: an object on each line")
            yield where, line


def _characters(body: Mapping[str, Any]) -> int:
    """The characters of all text in a request's messages, prompt or input."""
    return sum(_text_length(body.get(name)) for name in ("messages", "prompt", "input"))


def _text_length(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        value = [value.get(name) for name in ("content", "text")]
    return sum(map(_text_length, value)) if isinstance(value, list) else 0


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
