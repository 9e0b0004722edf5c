"""The comparison that ``nox -s npu`` runs on a user's device runs on CPU, too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from batchjob_testkit.tiny_model import make_tiny_model

pytestmark = pytest.mark.engine

SCRIPT = Path(__file__).parents[4] / "benchmarks" / "on_device.py"
SECONDS = 600
STARVED = {
    "enforce_eager": True,
    "dtype": "float32",
    "num_gpu_blocks_override": 40,
    "block_size": 32,
    "max_num_seqs": 16,
}


def test_both_schedulers_are_run_and_compared(tmp_path):
    output = tmp_path / "result.json"
    model = make_tiny_model(tmp_path / "tiny")
    done = subprocess.run(
        (
            *(sys.executable, str(SCRIPT), "--model", str(model), "--output", str(output)),
            *("--requests", "30", "--repeats", "1", "--max-model-len", "512"),
            *("--engine-args", json.dumps(STARVED)),
        ),
        env={**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    result = json.loads(output.read_text(encoding="utf-8"))
    assert [run["scheduler"] for run in result["runs"]] == ["default", "batchjob"]
    assert {run["output_tokens"] for run in result["runs"]} == {result["runs"][0]["output_tokens"]}
    texts = {"requests": 30, "unanswered": 0, "differing": 0, "default_differing_from_itself": 0}
    assert result["texts"] == texts
    _, ours = result["runs"]
    assert {job["job"] for job in ours["jobs"]["jobs"]} == {"summaries", "stories", "labels"}
    assert "outputs" not in ours
