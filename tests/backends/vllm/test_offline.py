"""Eval stages on a stand-in for vLLM's environment: what is asked of it, and how its failures are told."""

import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from engine.stages import BUDGET, ROLLOUT, Recorder, spec_of

from opdctl import processes
from opdctl.backends import vllm
from opdctl.backends.contract import InputSpec, Stopped
from opdctl.backends.vllm import offline
from opdctl.errors import ProgramDied, StageFailed, StageRefused
from opdctl.settings import Rollout
from opdctl.workers import VllmResources, VllmWorkers

STAND_IN = Path(__file__).with_name("stand_in.py")
NEW = (InputSpec("models", "a", ""),)
LIMIT = ROLLOUT["max_completion_tokens"]


def exam(folder, mode="", *, models=NEW, device="cpu", stall_timeout_s=60.0, **config):
    folder.mkdir(exist_ok=True)
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {STAND_IN} "{mode}" "$@"\n')
    python.chmod(0o755)
    settings = {
        "data": {"tasks": ["math", "code"], "efforts": ["low", "max"]},
        "rollout": ROLLOUT | {"prompts": 3, "group_size": 2},
        **config,
    }
    spec = spec_of(folder, "eval", settings, list(models), backend="vllm")
    workers = VllmWorkers(python=str(python), device=device, stall_timeout_s=stall_timeout_s)
    resources = {**spec.resources, "vllm": VllmResources(tensor_parallel=2, memory=0.5, max_num_seqs=7).model_dump()}
    return replace(spec, workers=workers.model_dump(), resources=resources)


def noted(spec, what):
    """What the stand-in was given."""
    lines = (Path(spec.events).parent / "log.txt").read_text().splitlines()
    found = [json.loads(line) for line in lines if line.startswith("{")]
    return [line[what] for line in found if what in line]


def test_completions_are_judged_and_counted_as_those_of_the_embedded_engine(tmp_path):
    spec = exam(tmp_path / "eval")
    result = vllm.run(spec, Recorder())
    report = json.loads(Path(spec.output, "report.json").read_text())
    assert result.step == 1
    assert report["cells"] == ["math.low", "math.max", "code.low", "code.max"]
    assert report["models"]["a"]["math.max"]["n"] == 6
    assert report["models"]["a"]["math.max"]["length_mean"] == 2
    assert report["models"]["a"]["math.max"]["truncated"] == 0
    assert report["models"]["a"]["math.max"]["correct"] == 0


def test_completions_without_an_end_are_truncated(tmp_path):
    spec = exam(tmp_path / "eval", "never ends")
    vllm.run(spec, Recorder())
    counts = json.loads(Path(spec.output, "report.json").read_text())["models"]["a"]["code.low"]
    assert (counts["truncated"], counts["length_mean"]) == (6, LIMIT)


def test_all_cells_are_asked_at_once_each_completion_with_a_seed_of_its_own(tmp_path):
    spec = exam(tmp_path / "eval", rollout=ROLLOUT | {"prompts": 3, "group_size": 2, "temperature": 0.7, "top_k": 5})
    vllm.run(spec, Recorder())
    [request] = noted(spec, "request")
    assert len(request["prompts"]) == 4 * 3
    seeds = [seed for of in request["seeds"] for seed in of]
    assert len(set(seeds)) == len(seeds) == 4 * 3 * 2
    assert request["sampling"] == {
        "max_tokens": LIMIT,
        "temperature": 0.7,
        "top_p": 1.0,
        "top_k": 5,
        "stop_token_ids": [2],
        "ignore_eos": True,
    }


def test_the_engine_is_made_for_the_device(tmp_path):
    cpu, gpu = exam(tmp_path / "cpu"), exam(tmp_path / "gpu", device="cuda")
    vllm.run(cpu, Recorder())
    vllm.run(gpu, Recorder())
    [on_cpu], [on_gpu] = noted(cpu, "arguments"), noted(gpu, "arguments")
    assert on_cpu.pop("enforce_eager") is True
    assert on_cpu.pop("kv_cache_memory_bytes") > 0
    assert on_cpu.pop("enable_chunked_prefill") is False
    assert on_cpu.pop("max_num_batched_tokens") >= on_cpu["max_model_len"]
    assert on_gpu.pop("tensor_parallel_size") == 2
    assert on_gpu.pop("gpu_memory_utilization") == 0.5
    assert on_cpu.pop("model") != on_gpu.pop("model")
    assert on_cpu == on_gpu
    assert on_cpu["dtype"] == "float32"
    assert on_cpu["max_num_seqs"] == 7
    assert on_cpu["max_model_len"] == ROLLOUT["max_prompt_tokens"] + LIMIT


def test_weights_are_of_the_precision_that_the_stage_names(tmp_path):
    spec = exam(tmp_path / "eval", precision="bfloat16")
    vllm.run(spec, Recorder())
    [arguments] = noted(spec, "arguments")
    assert arguments["dtype"] == "bfloat16"


def test_a_cold_start_model_that_is_examined_next_is_loaded_once(tmp_path):
    within = {"tau": {"low": 0.8, "max": 1.2}, "budget": BUDGET}
    before, after = InputSpec("before", "sft", ""), InputSpec("after", "mopd", "")
    spec = exam(tmp_path / "eval", models=(before, replace(after, path=str(made(tmp_path)))), within=within)
    vllm.run(spec, Recorder())
    counts = json.loads(Path(spec.output, "report.json").read_text())["models"]
    assert counts["sft"]["math.max"]["within"] is not None
    assert len(noted(spec, "arguments")) == 2


def test_a_stopped_stage_keeps_what_is_scored(tmp_path):
    spec = exam(tmp_path / "eval", models=(*NEW, InputSpec("models", "b", str(made(tmp_path)))))
    with pytest.raises(Stopped):
        vllm.run(spec, Recorder(1))
    assert vllm.run(spec, Recorder()).step == 2
    assert len(noted(spec, "arguments")) == 2


def test_a_sample_stage_asks_block_by_block_and_keeps_what_ends(tmp_path):
    spec = exam(tmp_path / "eval", models=[InputSpec("model", "a", "")], keep="all", per_prompt=2, save_every=2)
    result = vllm.run(replace(spec, kind="sample"), Recorder())
    assert [len(request["prompts"]) for request in noted(spec, "request")] == [2, 1] * 4
    assert len(noted(spec, "arguments")) == 1
    rows = [json.loads(line) for line in Path(spec.output, "data.jsonl").read_text().splitlines()]
    assert len(rows) == result.metrics["kept"] == 4 * 3 * 2
    assert {row["tokens"] for row in rows} == {2}


def made(folder):
    """A model's folder, by the way that the backend makes one."""
    rollout = Rollout.model_validate(ROLLOUT)
    return offline.Offline(exam(folder / "maker"), Recorder(), rollout, VllmResources())._made(folder / "model")


@pytest.mark.parametrize(
    ("mode", "told"),
    [
        ("cannot load", "vLLM failed with a: ValueError: this architecture is unknown"),
        ("is killed", "vLLM's process for a was killed by SIGKILL"),
        ("exits", "vLLM's process for a ended with exit code 3"),
        ("prints", "answered 'INFO: all is well.*' instead of index or done"),
        ("loses one", "answered with 23 completions instead of 24"),
        ("repeats one", "a completion that cannot be"),
        ("invents a prompt", "a completion that cannot be"),
        ("invents a token", "a completion that cannot be"),
        ("goes past the end", "a completion that cannot be"),
        ("gives up early", "a completion that cannot be"),
        ("goes past the limit", "a completion that cannot be"),
        ("says nan", "a completion that cannot be"),
    ],
)
def test_a_failure_is_told_by_name(tmp_path, mode, told):
    spec = exam(tmp_path / "eval", mode)
    with pytest.raises(StageFailed, match=told) as failure:
        vllm.run(spec, Recorder())
    assert str(Path(spec.events).parent / "log.txt") in failure.value.hint
    assert isinstance(failure.value, ProgramDied) == (mode == "is killed")  # which is tried again
    assert not processes.find(Path(spec.events).parent)


@pytest.mark.parametrize("mode", ["hangs while loading", "hangs"])
def test_a_hung_process_is_ended_with_its_stacks_in_the_log(tmp_path, mode, monkeypatch):
    monkeypatch.setattr(offline, "DUMP_S", 0.5)
    spec = exam(tmp_path / "eval", mode, stall_timeout_s=1.5)
    with pytest.raises(StageFailed, match=r"workers.vllm.stall_timeout_s = 1.5 seconds"):
        vllm.run(spec, Recorder())
    assert "stand_in.py" in (Path(spec.events).parent / "log.txt").read_text()
    assert not processes.find(Path(spec.events).parent)


def test_a_stop_ends_the_whole_tree(tmp_path):
    spec = exam(tmp_path / "eval", "hangs while loading")

    class Asked(Recorder):
        def stop_requested(self):
            log = Path(spec.events).parent / "log.txt"
            return log.exists() and "child" in log.read_text()

    began = time.monotonic()
    with pytest.raises(Stopped):
        vllm.run(spec, Asked())
    assert time.monotonic() - began < 30
    [child] = noted(spec, "child")
    assert not Path(f"/proc/{child}/exe").exists()


def test_a_prompt_that_leaves_no_room_is_refused_by_the_models_name(tmp_path):
    spec = exam(tmp_path / "eval")
    shape = {**spec.new_model["shape"], "max_position_embeddings": 12}
    with pytest.raises(StageRefused, match=r"13 tokens, and a has max_position_embeddings 12"):
        vllm.run(replace(spec, new_model={**spec.new_model, "shape": shape}), Recorder())


def checked(spec, **workers):
    [lines] = vllm.check([replace(spec, workers={**spec.workers, **workers})]).values()
    return lines


def test_check_asks_the_interpreter_for_vllm(tmp_path):
    spec = exam(tmp_path / "eval")
    [absent] = checked(spec, python=str(tmp_path / "nowhere"), device="cuda")
    [without] = checked(spec, python=sys.executable, device="cuda")
    [no_python] = checked(spec, python=str(STAND_IN), device="cuda")
    assert "no such file" in absent
    assert "has no vLLM" in without
    assert "does not run" in no_python
    assert checked(spec, python="/bin/true", device="cuda") == []


def test_check_knows_the_head_sizes_of_vllm_on_a_cpu(tmp_path):
    spec = exam(tmp_path / "eval")
    [line] = checked(spec, python="/bin/true")
    assert "models a: attention heads of 16" in line
    shape = {**spec.new_model["shape"], "head_dim": 32}
    assert checked(replace(spec, new_model={**spec.new_model, "shape": shape}), python="/bin/true") == []
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 96, "num_attention_heads": 2}))
    folder = replace(spec, inputs=[InputSpec("models", "b", str(tmp_path))])
    assert "models b: attention heads of 48" in checked(folder, python="/bin/true")[0]


def test_check_refuses_a_temperature_that_vllm_would_raise(tmp_path):
    spec = exam(tmp_path / "eval", rollout=ROLLOUT | {"temperature": 0.001})
    [line] = checked(spec, python="/bin/true", device="cuda")
    assert "config.rollout.temperature: 0.001" in line
