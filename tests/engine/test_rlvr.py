"""Stages of kind rlvr with every surrogate and mismatch rule, through `embedded.run`."""

from pathlib import Path

import pytest
from engine.stages import BUDGET, ROLLOUT, Recorder, rlvr, run, sft, train

from opdctl.backends.contract import InputSpec

SURROGATES = {
    "clip": {"form": "clip", "low": 0.2, "high": 0.28},
    "dual": {"form": "clip", "low": 0.2, "high": 0.28, "dual": 3.0},
    "sequence": {"form": "clip", "low": 0.003, "high": 0.004, "level": "sequence"},
    "cispo": {"form": "cispo", "high": 0.1},
    "log_ratio_clip": {"form": "log_ratio_clip", "low": -0.1, "high": 0.1, "square": 0.1},
}
RULES = {
    "tis": {"rule": "tis", "floor": 0.2, "cap": 5.0},
    "icepop": {"rule": "icepop", "low": 0.5, "high": 5.0},
    "opsm": {"rule": "opsm", "delta": 0.0001},
    "sequence_mask": {"rule": "sequence_mask", "low": 0.999, "high": 1.002},
}
ON_CURRENT = {
    "dis": {"rule": "dis", "low": 0.2, "high": 0.2},
    "icepop_current": {"rule": "icepop", "low": 0.8, "high": 1.2, "policy": "current"},
}


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    spec = sft(tmp_path_factory.mktemp("start") / "sft", steps=60, train={"optimizer": {"lr": 1e-2}})
    run(spec)
    return Path(spec.output)


def metrics(folder, start, **config):
    """Of each rollout batch; two optimizer steps each, large enough to move ratios."""
    record = Recorder()
    config = {"aggregation": "sequence_mean", "train": train(8, 8, optimizer={"lr": 1e-2}), **config}
    spec = rlvr(folder, start, **config)
    run(spec, record)
    assert Path(spec.output, "model.safetensors").read_bytes() != Path(start, "model.safetensors").read_bytes()
    return [found for _, found in record.events]


def ratios(found):
    """Of the rollout batches from which there was something to learn."""
    return [part["mismatch_ratio"] for part in found if "mismatch_ratio" in part]


@pytest.mark.parametrize("name", SURROGATES)
def test_a_stage_learns_by_the_surrogate_and_ratios_are_cut(tmp_path, start, name):
    found = metrics(tmp_path / "rl", start, surrogate=SURROGATES[name])
    assert max(part["clip_fraction"] for part in found) > 0
    assert not ratios(found)


def test_one_step_per_rollout_batch_learns_by_reinforce_as_by_the_clip(tmp_path, start):
    once = train(4, 16, optimizer={"lr": 1e-2})
    bare = metrics(tmp_path / "bare", start, surrogate={"form": "reinforce"}, train=once)
    clip = metrics(tmp_path / "clip", start, train=once)
    assert [part["reward"] for part in bare] == [part["reward"] for part in clip]
    for one, other in zip(bare, clip, strict=True):
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)


@pytest.mark.parametrize("name", RULES)
def test_the_sampler_of_the_same_engine_agrees_with_the_trainer(tmp_path, start, name):
    """Two ways to compute one distribution: k is 1 but for rounding. Only opsm acts, which looks at moves."""
    found = metrics(tmp_path / "rl", start, mismatch=RULES[name])
    if name == "opsm":
        assert max(part["mismatch_fraction"] for part in found) > 0
    else:
        assert not any(part["mismatch_fraction"] for part in found)
        assert ratios(found)
        assert ratios(found) == pytest.approx([1] * len(ratios(found)), abs=1e-4)


@pytest.mark.parametrize("name", ON_CURRENT)
def test_a_rule_on_the_current_policy_drops_tokens_that_moved(tmp_path, start, name):
    found = metrics(tmp_path / "rl", start, surrogate={"form": "reinforce"}, mismatch=ON_CURRENT[name])
    assert max(part["mismatch_fraction"] for part in found) > 0


def test_a_cut_distribution_is_a_mismatch(tmp_path, start):
    """With top_p the sampler's probabilities are larger than the policy's own: k is the share that was kept."""
    rollout = ROLLOUT | {"top_p": 0.7}
    found = metrics(tmp_path / "rl", start, mismatch=RULES["tis"], rollout=rollout)
    assert max(ratios(found)) < 0.999


def test_half_precision_is_a_mismatch(tmp_path, start):
    """bfloat16 rounds one way with a cache and another without."""
    half = train(8, 8, precision="bfloat16", optimizer={"lr": 1e-2})
    narrow = {"rule": "sequence_mask", "low": 0.999, "high": 1.001}
    found = metrics(tmp_path / "rl", start, mismatch=narrow, train=half)
    assert max(part["mismatch_fraction"] for part in found) > 0


def test_max_advantage_bounds_what_a_completion_weighs(tmp_path, start):
    """On-policy the gradient is linear in A, and a bound below all of |A| makes every weight the bound."""
    config = {"train": train(2, 16), "advantage": "mean", "aggregation": "constant"}
    small = metrics(tmp_path / "small", start, max_advantage=1e-3, **config)
    smaller = metrics(tmp_path / "smaller", start, max_advantage=1e-4, **config)
    assert small[0]["grad_norm"] == pytest.approx(10 * smaller[0]["grad_norm"], rel=1e-3)


@pytest.mark.parametrize("square", [0.0, 0.1])
def test_the_square_of_the_log_ratio_pulls_completions_without_advantage_too(tmp_path, start, square):
    """Every completion is over budget, so every advantage is 0: tokens are computed where the square needs them."""
    record = Recorder()
    effort = {"tau": 0.01, "anneal": "hard", "budget": BUDGET}
    surrogate = SURROGATES["log_ratio_clip"] | {"square": square}
    cold = (InputSpec("budget", "sft", str(start)),)
    run(rlvr(tmp_path / "rl", start, inputs=cold, effort=effort, surrogate=surrogate, mismatch=RULES["tis"]), record)
    assert all(("mismatch_ratio" in found) == (square > 0) for _, found in record.events)
