"""A user's script: ``LLM.generate`` numbers the requests itself, so extra arguments name the job."""

from __future__ import annotations

import json
import sys

from vllm import LLM, SamplingParams


def main(model: str) -> None:
    """Two jobs through ``LLM(additional_config=...)``; prints each output's text length as JSON."""
    llm = LLM(
        model=model,
        max_model_len=512,
        enforce_eager=True,
        additional_config={"scheduler_config": {"batch_job_sched_config": {"enabled": True}}},
    )
    prompts = [f"Prompt {number}" for number in range(6)]
    params = [
        SamplingParams(temperature=0, max_tokens=5 + number, extra_args={"job_name": f"job {number % 2}"})
        for number in range(6)
    ]
    outputs = llm.generate(prompts, params)
    print("OUTPUTS", json.dumps([len(output.outputs[0].token_ids) for output in outputs]))


if __name__ == "__main__":
    main(sys.argv[1])
