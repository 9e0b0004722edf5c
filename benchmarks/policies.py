"""What the benchmark compares. A policy is a row of its tables: add one here, and no more is needed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from tables import Roles

from batchjob_testkit.simulator.scenario import (
    Scenario,
    as_given,
    lengths_told,
    longest_job_first,
    longest_request_urgent,
)
from batchjob_testkit.simulator.vllm_backend import VllmBackend

Kind = Literal["peer", "clairvoyant", "ours", "ablation"]

OURS = "batchjob_scheduler.scheduler.BatchJobAwareScheduler"


@dataclass(frozen=True, kw_only=True)
class Policy:
    """A scheduler with its options, and the order in which the input is written for it."""

    name: str
    kind: Kind
    backend: VllmBackend
    arrange: Callable[[Scenario], Scenario] = as_given


def ours(name: str, kind: Kind, **keys: Any) -> Policy:
    """Our scheduler with these configuration keys."""
    section = {"batch_job_sched_config": {"enabled": True, **keys}}
    return Policy(name=name, kind=kind, backend=VllmBackend(scheduler=OURS, additional_config=section))


def peer(name: str, **options: Any) -> Policy:
    """Another scheduler, or vLLM's with these options."""
    return Policy(name=name, kind="peer", backend=VllmBackend(**options))


FCFS = "FCFS"
DEFAULT = "ours"
BLEND = "ours, blend"

POLICIES = (
    peer(FCFS),
    *(peer(f"FCFS, budget {tokens}", max_num_batched_tokens=tokens) for tokens in (2048, 512)),
    *(peer(f"FCFS, watermark {share}", scheduler_config={"watermark": share}) for share in (0.01, 0.05)),
    peer("longest max_tokens first", scheduler="decaying_reserve.DecayingReserveScheduler"),
    Policy(name="input sorted by job", kind="peer", backend=VllmBackend(), arrange=longest_job_first),
    ours("feature guide alone", "peer", guide_only=True),
    Policy(
        name="true lengths as priorities",
        kind="clairvoyant",
        backend=VllmBackend(policy="priority"),
        arrange=longest_request_urgent,
    ),
    replace(ours("ours, lengths told", "clairvoyant", max_jobs=0), arrange=lengths_told),
    ours(DEFAULT, "ours"),
    ours(BLEND, "ours", order="blend"),
    ours("without look-ahead", "ablation", look_ahead=False),
    ours("without step shaping", "ablation", step_shaping=False),
)

BY_NAME = {policy.name: policy for policy in POLICIES}

ROLES = Roles(
    kinds={policy.name: policy.kind for policy in POLICIES},
    first=FCFS,
    ours=DEFAULT,
    tuned="FCFS, best budget",
    tuned_from=(FCFS, "FCFS, budget 2048", "FCFS, budget 512"),
    ablations={
        "look_ahead": "without look-ahead",
        "step_shaping": "without step shaping",
        "guide_only": "feature guide alone",
    },
)
