"""``nox -s bench-engine``: batches on the real engine on CPU with the tiny model, FCFS and ours in turn.

Checks that what the virtual clock says is no artefact. Decoding is greedy, and each answer has a length
that was drawn beforehand, so that all compute the same. Prints wall times and their ratios, and asserts
nothing about them.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from policies import BLEND, BY_NAME, DEFAULT, FCFS
from tables import markdown

COMPARED = (FCFS, DEFAULT, BLEND)
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
    "logits_processors": ["fixed_lengths:EndsAfter"],
}
REQUESTS = 240
MOST_TOKENS = 600
# Prompt tokens at most (a byte is a token), and tokens of output in the mean.
JOBS = {"chat": (60, 120), "news": (200, 30), "labels": (40, 3)}


@dataclass(frozen=True)
class Measured:
    """A run of the batch."""

    seconds: float
    output_tokens: int
    preemptions: int


def serve(pipe: Connection, model: Path, policy: str, pool: dict[str, Any]) -> None:
    """An engine in this process and those that it starts, which measures runs until it is told to end."""
    from vllm import LLM  # noqa: PLC0415 - only where an engine runs

    backend = BY_NAME[policy].backend
    llm = LLM(
        model=str(model),
        scheduler_cls=backend.scheduler,
        additional_config=dict(backend.additional_config),
        **ENGINE,
        **pool,
    )
    pipe.send("ready")
    try:
        measure_runs(pipe, llm)
    finally:
        # Otherwise this process waits at its end for the engine's, which waits for work.
        llm.llm_engine.engine_core.shutdown()


def measure_runs(pipe: Connection, llm: Any) -> None:
    """Run the batch for each number that comes, and send what was measured, until there is None."""
    from fixed_lengths import LENGTH  # noqa: PLC0415 - only where an engine runs
    from vllm import SamplingParams  # noqa: PLC0415

    requests = batch()
    prompts = [prompt for _, prompt, _ in requests]
    while (run := pipe.recv()) is not None:
        params = [
            SamplingParams(
                temperature=0,
                max_tokens=MOST_TOKENS,
                # A job of its own in each run, since what was learnt in the last would help.
                extra_args={"job_name": f"{job} {run}", LENGTH: length},
            )
            for job, _, length in requests
        ]
        before = preemptions(llm)
        start = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        pipe.send(Measured(seconds, tokens, preemptions(llm) - before))


def batch() -> list[tuple[str, str, int]]:
    """Requests of three jobs in random order: job, prompt, tokens of output."""
    generator = Random(7)
    requests = []
    for number in range(REQUESTS):
        job = list(JOBS)[number % len(JOBS)]
        longest, mean = JOBS[job]
        prompt = "".join(generator.choices("abcdefgh ", k=generator.randint(longest // 2, longest)))
        requests.append((job, prompt, min(1 + int(generator.expovariate(1 / mean)), MOST_TOKENS)))
    generator.shuffle(requests)
    return requests


def preemptions(llm: Any) -> int:
    """All so far."""
    return sum(int(metric.value) for metric in llm.get_metrics() if metric.name == "vllm:num_preemptions")


@contextmanager
def engine(model: Path, policy: str, pool: dict[str, Any]) -> Iterator[Connection]:
    """The pipe to an engine in a process of its own, which ends with the block, whatever ends that."""
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, model, policy, pool))
    process.start()
    theirs.close()  # so that the end of the process is seen
    try:
        yield pipe
    finally:
        with suppress(BrokenPipeError):  # it has ended, with a message of its own
            pipe.send(None)
        process.join()


def compare(model: Path, pool: dict[str, Any], runs: int) -> dict[str, list[Measured]]:
    """The same batch on all engines in turn; a first run of each warms up and does not count."""
    measured: dict[str, list[Measured]] = {name: [] for name in COMPARED}
    with ExitStack() as engines:
        pipes = {name: engines.enter_context(engine(model, name, pool)) for name in COMPARED}
        for pipe in pipes.values():
            pipe.recv()
        for run in range(runs + 1):
            for name, pipe in pipes.items():
                pipe.send(run)
                result = pipe.recv()
                print(
                    f"run {run}, {name}: {result.seconds:.2f} s, {result.preemptions} preemptions", flush=True
                )
                if run:
                    measured[name].append(result)
    return measured


def rows(pool: str, measured: dict[str, list[Measured]]) -> list[list[str]]:
    """Least, middle and most of the times of each scheduler, and of the ratios in the same round."""
    return [
        [
            pool,
            name,
            spread([run.seconds for run in runs], ".2f"),
            spread([run.seconds / its.seconds for its, run in zip(measured[FCFS], runs, strict=True)], ".3f"),
            spread([run.preemptions for run in runs], ".0f"),
            spread([run.output_tokens for run in runs], ".0f"),
        ]
        for name, runs in measured.items()
    ]


def spread(values: list[float], form: str) -> str:
    """Least / middle / most, or the one value that all have."""
    figures = [f"{value:{form}}" for value in (min(values), median(values), max(values))]
    return " / ".join(dict.fromkeys(figures))


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
        table = [row for pool, options in POOLS.items() for row in rows(pool, compare(model, options, runs))]
    print(f"Least / middle / most of {runs} runs of {REQUESTS} requests on each engine in turn:\n")
    print(markdown(["KV cache", "scheduler", "s", "of FCFS", "preemptions", "output tokens"], table))


if __name__ == "__main__":
    main()
