"""The user guide says the same in English and in Chinese, and what the code does."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

from batchjob_scheduler.config import BatchJobConfig, requested
from batchjob_scheduler.jobs import tagged_job

DOCS = Path(__file__).parent.parent / "docs"
GUIDES = {"English": DOCS / "guide.md", "Chinese": DOCS / "zh" / "guide.md"}
TEXTS = {language: path.read_text(encoding="utf-8") for language, path in GUIDES.items()}
EXAMPLE = (DOCS / "examples" / "input.jsonl").read_text(encoding="utf-8")

in_each_language = pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)


def blocks(text, language="[a-z]+"):
    """The fenced blocks of a document."""
    return re.findall(rf"^```(?:{language})\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def test_commands_and_examples_are_the_same_in_both():
    english, chinese = (blocks(text) for text in TEXTS.values())
    assert len(english) > 4
    assert english == chinese


def test_headings_correspond():
    english, chinese = (
        [line.count("#") for line in re.findall(r"^#+ ", t, re.MULTILINE)] for t in TEXTS.values()
    )
    assert english == chinese


@in_each_language
def test_the_table_has_each_key_with_its_type_and_default(text):
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| `([^`]+)` \| \S", text, flags=re.MULTILINE)
    documented = {key: (kind, default) for key, kind, default in rows}
    fields = {key: field.default for key, field in BatchJobConfig.model_fields.items()}
    missing, gone = fields.keys() - documented.keys(), documented.keys() - fields.keys()
    assert not missing, f"the guide's table lacks the keys {sorted(missing)} of BatchJobConfig"
    assert not gone, f"the guide's table has the keys {sorted(gone)}, which BatchJobConfig has not"
    for key, default in fields.items():
        assert documented[key] == (type(default).__name__, json.dumps(default).strip('"')), key


@in_each_language
def test_each_command_switches_it_on(text):
    configurations = re.findall(r"--additional-config '([^']+)'", text)
    assert len(configurations) == len(re.findall(r"vllm\.entrypoints\.openai\.run_batch", text)) > 2
    for configuration in configurations:
        assert requested(json.loads(configuration)) is not None


@in_each_language
def test_the_python_example_switches_it_on_and_names_a_job(text):
    (example,) = blocks(text, "python")
    keywords = {
        keyword.arg: ast.literal_eval(keyword.value)
        for node in ast.walk(ast.parse(example))
        if isinstance(node, ast.Call)
        for keyword in node.keywords
    }
    assert requested(keywords["additional_config"]) is not None
    assert keywords["extra_args"] == {"job_name": "job_A"}


@in_each_language
def test_the_input_names_jobs_in_the_documented_format(text):
    (lines,) = blocks(text, "json")
    assert lines == EXAMPLE
    ids = [json.loads(line)["body"]["request_id"] for line in lines.splitlines()]
    assert [tagged_job(name) for name in ids] == ["job_A", "job_A", "job_B"]
    assert "`#job_name[NAME]#`" in text
    assert tagged_job("#job_name[NAME]#") == "NAME"
