"""The tables that the command ``batchjob`` prints."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tabulate import tabulate

from batchjob_scheduler.report import Report


def answers_table(output: Path) -> str:
    """Each request of a batch's output file with its finish reason and length in tokens."""
    rows = [row for line in _lines(output) for row in _answer_rows(line)]
    return tabulate(rows, headers=["custom_id", "finish reason", "tokens"])


def jobs_table(report: Report) -> str:
    """What the scheduler saw and did, per job."""
    rows = [
        (
            job.job,
            job.requests,
            job.finished,
            job.observed,
            job.observed_tokens,
            job.predicted_tokens,
            job.preemptions,
            job.steps,
        )
        for job in report.jobs
    ]
    headers = ["job", "requests", "over", "observed", "mean decode", "predicted", "preemptions"]
    table = tabulate(rows, headers=[*headers, "steps"], floatfmt=".1f", missingval="-")
    forgotten = f", {report.forgotten_jobs} jobs gave up their place" * bool(report.forgotten_jobs)
    return f"{table}\n{report.steps} steps in all{forgotten}"


def _lines(output: Path) -> Iterator[Mapping[str, Any]]:
    with output.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                try:
                    yield json.loads(line)
                except json.JSONDecodeError as error:
                    raise ValueError(f"{output}, line {number} is not JSON: {error}") from None


def _answer_rows(line: Mapping[str, Any]) -> Iterator[tuple[str, str, int | None]]:
    name = line["custom_id"]
    body = (line.get("response") or {}).get("body") or {}
    choices = body.get("choices") or []
    if line.get("error") or not body:
        yield name, f"error: {_message(line.get('error'))}", None
        return
    tokens = (body.get("usage") or {}).get("completion_tokens")
    if not choices:  # an embedding or a score decodes nothing
        yield name, "done", tokens
    for number, choice in enumerate(choices):
        label = name if len(choices) == 1 else f"{name} [{number}]"
        yield label, choice.get("finish_reason") or "-", tokens
        tokens = None  # the usage counts all choices together


def _message(error: Any) -> str:
    while isinstance(error, Mapping):
        error = error.get("error") or error.get("message")
    return str(error)
