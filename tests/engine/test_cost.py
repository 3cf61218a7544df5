"""What a stage says that it cost: CPU seconds, sampled tokens and completions, over all attempts."""

import json
from pathlib import Path

import pytest
from engine.stages import Recorder, opd, rlvr, run, sft

from opdctl.backends.contract import Stopped

COST = {"cpu_seconds", "sampled_tokens", "sampled_completions"}


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    spec = sft(tmp_path_factory.mktemp("cost") / "sft", steps=4)
    run(spec)
    return Path(spec.output)


def distilling(folder, start):
    teachers = {(domain, effort): start for domain in ("math", "code") for effort in ("low", "max")}
    return opd(folder, start, teachers, {"form": "full_vocab"})


def test_sampled_tokens_are_those_of_all_steps(tmp_path, start):
    control = Recorder()
    result = run(distilling(tmp_path / "opd", start), control)
    assert result.metrics["sampled_completions"] == 4 * 8
    assert result.metrics["sampled_tokens"] == pytest.approx(sum(8 * m["length"] for _, m in control.events))


def test_rounds_of_dynamic_sampling_cost_what_they_draw(tmp_path, start):
    control = Recorder()
    result = run(rlvr(tmp_path / "rlvr", start, dynamic_sampling={"max_rounds": 3}), control)
    batches = {step: m["sampling_rounds"] for step, m in control.events}
    assert result.metrics["sampled_completions"] == 16 * sum(batches.values())
    assert sum(batches.values()) > len(batches)


def test_a_resumed_stage_counts_what_came_before(tmp_path, start):
    whole, cut = distilling(tmp_path / "whole", start), distilling(tmp_path / "cut", start)
    undisturbed = run(whole).metrics
    with pytest.raises(Stopped):
        run(cut, Recorder(stop_at=3))
    counters = next(Path(cut.state).glob("step-*/counters.json"))
    saved = json.loads(counters.read_text())
    assert saved["position"]["cpu_ms"] > 0
    saved["position"]["cpu_ms"] += 100_000
    counters.write_text(json.dumps(saved))
    resumed = run(cut).metrics
    assert resumed["cpu_seconds"] > 100
    for name in ("sampled_tokens", "sampled_completions"):
        assert resumed[name] == undisturbed[name]


def test_a_stage_that_asks_no_model_has_no_sampling_cost(tmp_path):
    assert run(sft(tmp_path / "sft", steps=2)).metrics.keys() & COST == {"cpu_seconds"}
