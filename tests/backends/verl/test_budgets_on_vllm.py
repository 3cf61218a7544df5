"""A cold-start model too large for the worker is asked in vLLM, and its budgets are those of the embedded engine."""

import os
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from engine import stages

from opdctl.backends.contract import InputSpec
from opdctl.backends.verl import budgets, data
from opdctl.settings import Resources, RlvrSettings
from opdctl.workers import VerlWorkers

PYTHON = Path(os.environ.get("OPDCTL_VERL_PYTHON", stages.ROOT / ".venv-verl/bin/python"))
pytestmark = [
    pytest.mark.verl,
    pytest.mark.skipif(not PYTHON.exists(), reason=f"{PYTHON}: no such file (`make verl-env`)"),
    pytest.mark.xdist_group("vllm"),  # it takes all cores
]
GREEDY = stages.ROLLOUT | {"max_completion_tokens": 8, "top_k": 1}  # both engines draw the same


def test_budgets_by_vllm_are_those_of_the_embedded_engine(tmp_path, monkeypatch):
    model = {**stages.MODEL, "shape": {**stages.MODEL["shape"], "head_dim": 32}}  # a size that vLLM knows on a CPU
    trained = replace(stages.sft(tmp_path / "sft", steps=60), new_model=model)
    stages.run(trained)
    found = []
    for limit in (budgets.OWN_ENGINE_BYTES, 0):
        monkeypatch.setattr(budgets, "OWN_ENGINE_BYTES", limit)
        given = InputSpec("budget", "cold start", trained.output)
        effort = {"tau": 1.0, "anneal": "hard", "budget": stages.BUDGET | {"samples": 1}}
        spec = stages.rlvr(tmp_path / str(limit), Path(trained.output), inputs=(given,), effort=effort, rollout=GREEDY)
        spec = replace(
            spec,
            config=RlvrSettings.model_validate(spec.config).model_dump(mode="json"),
            resources=Resources().model_dump(mode="json"),
            workers=VerlWorkers(python=str(PYTHON.absolute()), device="cpu").model_dump(mode="json"),
        )
        rows = pq.read_table(data.write(spec, stages.Recorder()).train).to_pylist()
        found.append([row["extra_info"]["budget"] for row in rows])
    assert found[0] == found[1]
    assert len(set(found[0])) > 1
