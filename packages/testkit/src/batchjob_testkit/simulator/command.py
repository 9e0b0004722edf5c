"""Will it help my batch? Predicts how long a batch takes under the engine's scheduler and under another."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from batchjob_testkit.engines import EngineLimits, NoProgressError
from batchjob_testkit.simulator.fake_backend import FakeBackend
from batchjob_testkit.simulator.fit import fit_profile, read_step_log
from batchjob_testkit.simulator.lengths import LengthsError, read_batch, read_csv
from batchjob_testkit.simulator.plots import plot_runs
from batchjob_testkit.simulator.profiles import PROFILES, TIMINGS, DeviceProfile, Timing
from batchjob_testkit.simulator.scenario import Scenario
from batchjob_testkit.simulator.simulation import Result, SimulatedEngine, simulate
from batchjob_testkit.workloads import Workload, WorkloadRequest

DEFAULT_LABEL: Final = "engine's default"

EPILOG: Final = """
The batch is a CSV file with the columns prompt_tokens and output_tokens, and if wanted job, max_tokens and
prefix_tokens; or a batch file (.jsonl) as run-batch takes it, together with --answers or --output-tokens.

Examples:
  python -m batchjob_testkit.simulator lengths.csv
  python -m batchjob_testkit.simulator lengths.csv --device ascend_910b --scheduler my_package.MyScheduler
  python -m batchjob_testkit.simulator input.jsonl --answers output.jsonl --plot batch.svg
  python -m batchjob_testkit.simulator input.jsonl --output-tokens news=200 --output-tokens '*=40'
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the arguments, run the simulation, print the prediction. What is wrong ends it in one line."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        print(predict(options))
    except (ValueError, ModuleNotFoundError, OSError, NoProgressError) as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")


def predict(options: argparse.Namespace) -> str:
    """The prediction as text."""
    profile, timings = _profile(options)
    scenario = _scenario(options, profile)
    runs = {
        label: simulate(make_engine, scenario, profile, timings=timings, keep_moments=bool(options.plot))
        for label, make_engine in _engines(options).items()
    }
    limits, jobs = scenario.limits, {request.job for request in scenario.requests}
    cache = f"{limits.usable_blocks} KV cache blocks of {limits.block_size} tokens"
    batch = f"{len(scenario.requests)} requests of {len(jobs)} jobs"
    parts = [
        f"{batch} on {profile.name}: {cache}, up to {limits.max_num_seqs} requests at once",
        _constants(profile),
    ]
    parts += [
        _table(timing, {label: results[timing] for label, results in runs.items()}) for timing in timings
    ]
    if options.plot:
        plot_runs(options.plot, {label: results[timings[0]] for label, results in runs.items()})
        parts.append(f"The plot is in {options.plot}.")
    return "\n\n".join(parts)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m batchjob_testkit.simulator",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("batch", type=Path, help="lengths (.csv) or a batch (.jsonl)")
    of_batch = parser.add_argument_group("a batch file")
    of_batch.add_argument("--answers", type=Path, help="output file of an earlier run, which has the lengths")
    of_batch.add_argument(
        "--output-tokens",
        type=_job_mean,
        action="append",
        default=[],
        metavar="JOB=MEAN",
        help="how much a job decodes in the mean, * for any other job; where no answer says it",
    )
    of_batch.add_argument(
        "--output-spread", type=float, default=0.5, help="deviation of its logarithm (default: %(default)s)"
    )
    of_device = parser.add_argument_group("the device, with an 8B model in 16 bits")
    of_device.add_argument("--device", choices=PROFILES, default="h100")
    of_device.add_argument(
        "--profile-log", type=Path, help="CSV of your own steps: tokens, context_tokens, seconds"
    )
    of_device.add_argument("--kv-cache-tokens", type=int, help="size of the KV cache (default: the device's)")
    of_engine = parser.add_argument_group("the engine")
    of_engine.add_argument("--block-size", type=int, default=16)
    of_engine.add_argument("--max-model-len", type=int, default=8192)
    of_engine.add_argument("--max-num-seqs", type=int, default=256)
    of_engine.add_argument("--max-num-batched-tokens", type=int, default=8192)
    of_engine.add_argument("--enable-prefix-caching", action="store_true")
    of_engine.add_argument("--arrivals-per-second", type=float, help="default: all at once")
    of_engine.add_argument(
        "--scheduler", metavar="CLASS", help="dotted name of a scheduler class to compare with; needs vLLM"
    )
    of_engine.add_argument(
        "--additional-config", type=_json_object, default={}, metavar="JSON", help="its configuration"
    )
    of_engine.add_argument("--fake", action="store_true", help="the fake engine, for machines without vLLM")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="draw batch and KV cache over time")
    return parser


def _job_mean(text: str) -> tuple[str, float]:
    job, _, mean = text.rpartition("=")
    try:
        tokens = float(mean)
    except ValueError:
        tokens = 0.0
    if not job or tokens < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, allowed: JOB=MEAN with a mean of at least 1")
    return job, tokens


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"got {text!r}, allowed: a JSON object")
    return value


def _profile(options: argparse.Namespace) -> tuple[DeviceProfile, Sequence[Timing]]:
    """The device, and the timings between which the truth lies; a log decides which one fits."""
    profile = PROFILES[options.device]
    timings: Sequence[Timing] = TIMINGS
    if options.profile_log:
        fit = fit_profile(read_step_log(options.profile_log), profile)
        profile = replace(fit.profile, name=f"the device of {options.profile_log.name}")
        timings = [fit.timing]
    tokens = options.kv_cache_tokens or profile.num_blocks * profile.block_size
    return replace(profile, num_blocks=tokens // options.block_size, block_size=options.block_size), timings


def _scenario(options: argparse.Namespace, profile: DeviceProfile) -> Scenario:
    requests = _requests(options)
    if not requests:
        raise LengthsError(f"{options.batch}: no request, allowed: at least one")
    return Scenario(
        name=options.batch.name,
        workload=Workload(options.max_model_len, tuple(requests)),
        limits=EngineLimits(
            num_blocks=profile.num_blocks + 1,
            block_size=profile.block_size,
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
            max_model_len=options.max_model_len,
        ),
        enable_prefix_caching=options.enable_prefix_caching,
        arrivals_per_second=options.arrivals_per_second,
    )


def _requests(options: argparse.Namespace) -> list[WorkloadRequest]:
    if options.batch.suffix != ".jsonl":
        return read_csv(options.batch, max_model_len=options.max_model_len)
    return read_batch(
        options.batch,
        max_model_len=options.max_model_len,
        answers=options.answers,
        job_output_tokens=dict(options.output_tokens),
        output_spread=options.output_spread,
    )


def _engines(options: argparse.Namespace) -> dict[str, Callable[[Scenario], SimulatedEngine]]:
    if options.fake:
        if options.scheduler:
            raise ValueError(f"--scheduler is {options.scheduler!r}, allowed: none with --fake")
        return {DEFAULT_LABEL: FakeBackend()}
    try:
        from batchjob_testkit.simulator.vllm_backend import VllmBackend, scheduler_class  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{error}; without vLLM only --fake works") from None
    engines: dict[str, Callable[[Scenario], SimulatedEngine]] = {DEFAULT_LABEL: VllmBackend()}
    if options.scheduler:
        label = scheduler_class(options.scheduler).__name__
        engines[label] = VllmBackend(scheduler=options.scheduler, additional_config=options.additional_config)
    return engines


def _constants(profile: DeviceProfile) -> str:
    return (
        f"a step: {1e3 * profile.overhead_seconds:.2f} ms, "
        f"{1e3 * profile.weight_seconds:.2f} ms for the weights, "
        f"{1e6 * profile.seconds_per_token:.1f} µs a token, "
        f"{1e9 * profile.seconds_per_context_token:.1f} ns a token of context"
    )


def _table(timing: Timing, results: dict[str, Result]) -> str:
    """The figures of a run in each column."""
    first = results[DEFAULT_LABEL]
    rows = {
        f"timing {timing}": list(results),
        "makespan": [f"{result.makespan_seconds:.1f} s" for result in results.values()],
        "against the default": [
            f"{100 * (result.makespan_seconds / first.makespan_seconds - 1):+.1f} %"
            for result in results.values()
        ],
        "above the lower bound": [
            f"{100 * abs(result.ratio_to_bound - 1):.1f} %" for result in results.values()
        ],
        "output tokens a second": [f"{result.output_tokens_per_second:.0f}" for result in results.values()],
        "tokens a step": [f"{result.tokens_per_step:.0f}" for result in results.values()],
        "preemptions": [str(result.preemptions) for result in results.values()],
        "tokens computed again": [str(result.recomputed_tokens) for result in results.values()],
        "KV cache in use": [f"{100 * result.kv_use:.0f} %" for result in results.values()],
        "in the tail": [f"{result.tail_seconds:.1f} s" for result in results.values()],
        **{
            f"done: {job}": [f"{result.job_finish_seconds[job]:.1f} s" for result in results.values()]
            for job in sorted(first.job_finish_seconds)
        },
    }
    width = max(map(len, rows))
    widths = [max(len(cells[column]) for cells in rows.values()) for column in range(len(results))]
    return "\n".join(
        "  ".join([f"{title:{width}}", *(f"{cell:>{w}}" for cell, w in zip(cells, widths, strict=True))])
        for title, cells in rows.items()
    )
