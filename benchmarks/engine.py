"""``nox -s bench-engine``: batches on the real engine on CPU with the tiny model, ours and FCFS in turn.

Checks that what the virtual clock says is no artefact. The decode lengths are the model's own: a bias on
the end token sets their mean per job, a seed per request makes them the same in every run. Prints wall
times and their ratios, and asserts nothing about them.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from policies import OURS
from tables import markdown

SCHEDULERS = {"FCFS": None, "ours": OURS}
POOLS = {
    "starved, 39 blocks": {"num_gpu_blocks_override": 40, "block_size": 32},
    "ample": {"block_size": 32},
}
ENGINE = {
    "max_num_seqs": 16,
    "max_model_len": 1024,
    "enforce_eager": True,
    "dtype": "float32",
    # A second run of the same prompts must compute as much as the first.
    "enable_prefix_caching": False,
    "disable_log_stats": False,
}
# Prompt tokens at most, and the bias on the end token: about 120, 30 and 3 tokens of output in the mean.
JOBS = {"chat": (60, 1.0), "news": (200, 3.0), "labels": (40, 7.0)}


@dataclass(frozen=True)
class Measured:
    """A run of the batch."""

    seconds: float
    output_tokens: tuple[int, ...]
    preemptions: int


def serve(pipe: Connection, model: Path, scheduler: str | None, pool: dict[str, Any]) -> None:
    """An engine that runs the batch each time it is told the number of a run."""
    from vllm import LLM, SamplingParams  # noqa: PLC0415 - only where an engine runs

    arguments = {**ENGINE, **pool} | ({"scheduler_cls": scheduler} if scheduler else {})
    llm = LLM(model=str(model), **arguments)
    end = llm.get_tokenizer().eos_token_id
    pipe.send("ready")
    while (run := pipe.recv()) is not None:
        prompts, params = [], []
        for seed, (job, prompt, bias) in enumerate(batch()):
            prompts.append(prompt)
            params.append(
                SamplingParams(
                    max_tokens=600,
                    seed=seed,
                    logit_bias={end: bias},
                    # A job of its own in each run, since what was learnt in the last would help.
                    extra_args={"job_name": f"{job} {run}"},
                )
            )
        before = preemptions(llm)
        start = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        lengths = tuple(len(output.outputs[0].token_ids) for output in outputs)
        pipe.send(Measured(seconds, lengths, preemptions(llm) - before))


def batch() -> list[tuple[str, str, float]]:
    """Requests of three jobs in random order: job, prompt, bias on the end token."""
    generator = Random(7)
    requests = []
    for number in range(96):
        job = list(JOBS)[number % len(JOBS)]
        longest, bias = JOBS[job]
        prompt = "".join(generator.choices("abcdefgh ", k=generator.randint(longest // 2, longest)))
        requests.append((job, prompt, bias))
    generator.shuffle(requests)
    return requests


def preemptions(llm: Any) -> int:
    """All so far."""
    return sum(int(metric.value) for metric in llm.get_metrics() if metric.name == "vllm:num_preemptions")


def compare(model: Path, pool: dict[str, Any], runs: int) -> dict[str, list[Measured]]:
    """The same batch on both engines in turn; a first run of each warms up and does not count."""
    context = multiprocessing.get_context("spawn")
    pipes, processes = {}, []
    for name, scheduler in SCHEDULERS.items():
        pipes[name], theirs = context.Pipe()
        process = context.Process(target=serve, args=(theirs, model, scheduler, pool))
        process.start()
        processes.append(process)
        theirs.close()  # so that the end of the process is seen
    for pipe in pipes.values():
        pipe.recv()
    measured: dict[str, list[Measured]] = {name: [] for name in pipes}
    for run in range(runs + 1):
        for name, pipe in pipes.items():
            pipe.send(run)
            result = pipe.recv()
            print(f"run {run}, {name}: {result.seconds:.2f} s, {result.preemptions} preemptions", flush=True)
            if run:
                measured[name].append(result)
    for pipe in pipes.values():
        pipe.send(None)
    for process in processes:
        process.join()
    return measured


def row(pool: str, measured: dict[str, list[Measured]]) -> list[str]:
    """Least, middle and most of the times and of the ratios of neighbouring runs."""
    first, ours = measured.values()
    ratios = [mine.seconds / its.seconds for its, mine in zip(first, ours, strict=True)]
    return [
        pool,
        *(spread([run.seconds for run in runs], ".2f") for runs in (first, ours)),
        spread(ratios, ".3f"),
        *(spread([run.preemptions for run in runs], ".0f") for runs in (first, ours)),
        *(spread([sum(run.output_tokens) for run in runs], ".0f") for runs in (first, ours)),
    ]


def spread(values: list[float], form: str) -> str:
    """Least / middle / most."""
    return " / ".join(f"{value:{form}}" for value in (min(values), median(values), max(values)))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=7, help="of each engine (default: %(default)s)")
    runs = parser.parse_args().runs
    # No model hub is asked, no statistics are sent, and the KV cache has a size in GiB.
    os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    from batchjob_testkit.tiny_model import make_tiny_model  # noqa: PLC0415 - reads the environment

    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny_model(Path(folder) / "tiny")
        rows = [row(name, compare(model, pool, runs)) for name, pool in POOLS.items()]
    head = ["KV cache", "FCFS s", "ours s", "ratio", "FCFS preempts", "ours preempts"]
    print(f"Least / middle / most of {runs} runs of {len(batch())} requests, ours and FCFS in turn:\n")
    print(markdown([*head, "FCFS output tokens", "ours output tokens"], rows))


if __name__ == "__main__":
    main()
