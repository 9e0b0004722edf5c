"""What the scheduler saw and did, per job: as a line for the log and as JSON for the command line."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from batchjob_scheduler.jobs import Job


@dataclass(frozen=True)
class JobReport:
    """One job: its requests, decode lengths in tokens, preemptions, and steps that it took part in.

    ``observed_tokens`` is the mean over the ``observed`` requests that ended by themselves,
    ``predicted_tokens`` what the next one is expected to decode.
    """

    job: str
    requests: int
    finished: int
    observed: int
    observed_tokens: float | None
    predicted_tokens: int
    preemptions: int
    steps: int

    @classmethod
    def of(cls, job: Job) -> JobReport:
        """The report on a tracked job."""
        learnt = job.estimator
        mean = learnt.total_tokens / learnt.observations if learnt.observations else None
        return cls(
            job=job.name,
            requests=job.arrived,
            finished=job.finished,
            observed=learnt.observations,
            observed_tokens=mean,
            predicted_tokens=learnt.predicted_tokens,
            preemptions=job.preemptions,
            steps=job.steps,
        )


@dataclass(frozen=True)
class Report:
    """All tracked jobs, the engine's steps, and how many jobs gave up their place before (J4)."""

    steps: int
    forgotten_jobs: int
    jobs: tuple[JobReport, ...]

    @classmethod
    def of(cls, jobs: Iterable[Job], *, steps: int, forgotten_jobs: int) -> Report:
        """The report on the tracked jobs."""
        return cls(steps, forgotten_jobs, tuple(JobReport.of(job) for job in jobs))

    def log_lines(self) -> list[str]:
        """One line a job."""
        return [
            f"job {job.job!r}: {job.finished} of {job.requests} requests are over, "
            f"{job.observed} decode lengths observed"
            + (f" (mean {job.observed_tokens:.1f})" if job.observed_tokens is not None else "")
            + f", {job.predicted_tokens} tokens predicted, {job.preemptions} preemptions, "
            f"{job.steps} of {self.steps} steps"
            for job in self.jobs
        ]

    def write(self, path: Path) -> None:
        """Write it as JSON, so that a reader never sees half of it."""
        scratch = path.with_name(path.name + ".tmp")
        scratch.write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")
        scratch.replace(path)

    @classmethod
    def read(cls, path: Path) -> Report:
        """Read what :meth:`write` wrote."""
        raw = json.loads(path.read_text(encoding="utf-8"))
        return cls(raw["steps"], raw["forgotten_jobs"], tuple(JobReport(**job) for job in raw["jobs"]))
