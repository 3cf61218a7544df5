"""Published tasks as verl gets them: rows, settings of its trainers, and verdicts from what a row carries."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from engine.stages import ROOT

from opdctl.backends.verl import schema
from opdctl.backends.verl.judge import pack, unpack
from opdctl.config import load_pipeline
from opdctl.launch import Launcher
from opdctl.plan import make_plan
from opdctl.preflight import check_data
from opdctl.settings import TASKS
from opdctl.settings.public_task import NLTK
from opdctl.store import Workspace
from opdctl.tasks import load_task

PYTHON = Path(os.environ.get("OPDCTL_VERL_PYTHON", ROOT / ".venv-verl/bin/python"))
SUM = {"question": "What is 2 + 3?", "answer": "2 + 3 = <<2+3=5>>5\n#### 5"}
FUNCTION = {"text": "Double it.", "code": "def double(x):\r\n    return x * 2", "test_list": ["assert double(2) == 4"]}
RULE = {"prompt": "Say hello.", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}


@pytest.fixture
def data(workspace):
    """Published files in small: enough questions for every part."""
    rows = {
        "gsm8k/train.jsonl": [SUM | {"question": f"What is {n} + 3?"} for n in range(40)],
        "gsm8k/test.jsonl": [SUM | {"question": f"What is 3 + {n}?"} for n in range(200)],
        "mbpp/mbpp.jsonl": [FUNCTION | {"task_id": n, "test_setup_code": ""} for n in range(1, 650)],
        "ifeval/ifeval_input_data.jsonl": [RULE] * 200,
        **{f"nltk/{name}": ["the"] for name in NLTK},
    }
    for name, lines in rows.items():
        path = workspace / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return workspace


def load(folder, domains):
    overrides = ["scale=h200x8", "model=qwen3_8b", "task=kimi_k3_public", f"workers.verl.python={PYTHON}"]
    return load_pipeline("kimi_k3", [*overrides, f"scale.domains=[{','.join(domains)}]"], workspace=folder)


@pytest.mark.parametrize(
    "given", [{"task": "gsm8k", "path": "data/gsm8k"}, {"task": "word_problems", "drills": 8}], ids=str
)
def test_what_a_row_carries_is_enough_for_its_verdict(data, given):
    settings = TASKS[given["task"]].model_validate(given)
    task = load_task("sums", settings, None, data)
    for shown in task.demonstrations(0, 0, 4):
        carried = unpack(pack(shown.prompt), settings)
        assert task.verify(carried, shown.completion).correct
        assert not task.verify(carried, "no").correct


def test_data_of_kimi_k3_on_public_tasks_pass_the_look_before_a_run(data):
    pipeline = load(data, ["general", "code"])
    assert check_data(pipeline, pipeline.stages.values()) == []


@pytest.mark.verl
def test_verl_takes_the_stages_of_kimi_k3_on_public_tasks(data):
    if not PYTHON.exists():
        pytest.skip(f"no {PYTHON}: make verl-env")
    asked = []
    for domains in (["general", "coding_agents"], ["instructions", "code"]):
        plan = make_plan(load(data, domains), Workspace(data).run("kimi_k3"))
        launcher = Launcher(plan, plan.stages, lambda text: None, fetch=False)
        trained = [item for item in plan.stages if item.stage.settings.backend == "verl"]
        drafts = [launcher.spec(item, range(item.stage.settings.resources.gpus), None) for item in trained]
        asked += [replace(draft, stage=f"{domains[0]}: {draft.stage}") for draft in drafts]
    assert len(asked) == 18
    assert {stage: lines for stage, lines in schema.check(asked).items() if lines} == {}
