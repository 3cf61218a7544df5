"""conf/rl: each preset through a pipeline file, and its loss of one group by hand.

A group of four, the first two right. Its tokens' ratios r = pi / pi_old and k = pi_old / pi_infer, by completion:

    r       2, 1    1.25    3      0.5, 1
    k       1, 4    1       0.4    1, 1
    pi      all 1/2, but the last token 1/4; pi_ref = 2 pi

A = +-0.866 by mean and std, +-0.5 by mean, +-1.41421 by the others' mean and std.
"""

import math
from pathlib import Path

import pytest
import torch

from opdctl.config import builtin_folder, load_pipeline
from opdctl.engine.advantages import group_advantages
from opdctl.engine.losses import aggregate, kl_penalty, policy_loss
from opdctl.errors import ConfigError
from opdctl.settings import CispoSurrogate, RlvrSettings

SEQUENCE = torch.tensor([0, 0, 1, 2, 3, 3])
R = torch.tensor([2, 1, 1.25, 3, 0.5, 1], dtype=torch.float64)
K = torch.tensor([1, 4, 1, 0.4, 1, 1], dtype=torch.float64)
PI = torch.tensor([1 / 2] * 5 + [1 / 4], dtype=torch.float64)
A, LN2 = math.sqrt(3) / 2, math.log(2)
KL = 2 - 1 - LN2  # k3 of every token
FILE = """
defaults:
  - /model: tiny_qwen3
  - /task: kimi_k3_chains
  - /tracking: local
  - /scale: laptop
  - /stage@stages.rl: rlvr
  - /rl@stages.rl.config: {preset}
  - _self_
name: one
stages:
  rl:
    inputs: {{init: "model:"{reference}}}
    config:
      data: {{tasks: [general], efforts: [max]}}
      rollout: {{prompts: 12, max_completion_tokens: 4}}
      train: {{max_steps: 4, global_batch_size: {batch}, optimizer: {{lr: 1.0e-3}}}}
"""
UNDISCLOSED = {
    "grpo": {"surrogate.low": 0.2, "surrogate.high": 0.2},
    "dapo": {"overlong.buffer_tokens": 2},
    "cispo": {"surrogate.high": 0.5},
    "ring_1t": {"surrogate.low": 0.2, "surrogate.high": 0.2},
    "longcat_triplet": {"surrogate.low": 0.2, "surrogate.high": 0.28, "surrogate.dual": 2.0, "mismatch.cap": 2.0},
    "kimi_k2_5": {"surrogate.low": -0.5, "surrogate.high": 0.6, "surrogate.square": 0.1},
}
E6, E5 = math.exp(0.6), math.exp(-0.5)
SQUARES = 2 * math.log(2) ** 2 + math.log(1.25) ** 2 + math.log(3) ** 2
LOSSES = {
    # completions: (1.2 + 1) / 2, 1.2, -3, -(0.8 + 1) / 2
    "grpo": -A * (1.1 + 1.2 - 3 - 0.9) / 4 + 0.04 * KL,
    "deepseek_r1": -A * (1.5 + 1.25 - 3 - 0.75) / 4 + 0.001 * KL,
    "dr_grpo": -0.5 * (1.2 + 1 + 1.2 - 3 - 0.8 - 1) / (4 * 4),
    "dapo": -A * (1.28 + 1 + 1.25 - 3 - 0.8 - 1) / 6,
    # s: sqrt 2, 1.25, 3, sqrt 1/2
    "gspo": -A * (1.0004 + 1.0004 - 3 - 0.9997) / 4,
    # the last token's log pi is -2 ln 2
    "cispo": A * LN2 * (1.5 + 1 + 1.25 - 1.5 - 0.5 - 1 * 2) / 6,
    "ring_1t": -A * ((1 * 1.2 + 4 * 1) / 2 + 1.2 - 0 * 3 - 0.9) / 4,
    "glm5_reasoning": -A * ((1 * 1.28 + 0 * 1) / 2 + 1.25 - 0 * 3 - 0.9) / 4,
    # 2 holds both k = 4 and the ratio 3 of a negative advantage
    "longcat_triplet": -A * (1 * 1.28 + 2 * 1 + 1.25 - 0.4 * 2 - 0.8 - 1) / (4 * 4),
    "kimi_k2_5": (-0.5 * (E6 + 1 + 1.25 - E6 - E5 - 1) + 0.1 * SQUARES) / 6,
    "cascade2": A * LN2 * (1 + 1 + 1 - 1 - 1 - 2) / 6,
    "nemotron3_ultra": -math.sqrt(2) * (1 * 1.28 + 4 * 1 + 1.25 - 0.4 * 3 - 0.8 - 1) / 6,
}


def load(folder: Path, preset: str, given: dict[str, float]) -> RlvrSettings:
    file = folder / "one.yaml"
    reference = ', reference: "model:"' if preset in ("grpo", "deepseek_r1") else ""
    file.write_text(FILE.format(preset=preset, reference=reference, batch=96 if preset == "cascade2" else 48))
    overrides = [f"stages.rl.config.{key}={value}" for key, value in given.items()]
    config = load_pipeline(file, overrides, workspace=folder).stages["rl"].settings.config
    assert isinstance(config, RlvrSettings)
    return config


def loss(config: RlvrSettings) -> float:
    rewards = torch.tensor([[1, 1, 0, 0]], dtype=torch.float64)
    bound = config.max_advantage or math.inf
    advantages = group_advantages(rewards, config.advantage).clamp(-bound, bound).flatten()[SEQUENCE]
    policy, old, infer, reference = PI.log(), (PI / R).log(), (PI / R / K).log(), (2 * PI).log()
    of_token, _ = policy_loss(config.surrogate, config.mismatch, policy, old, infer, advantages, SEQUENCE)
    if config.kl.estimator != "none" and config.kl.placement == "loss":
        of_token = of_token + config.kl.coef * kl_penalty(policy, reference, config.kl.estimator)
    constant = float(config.rollout.max_completion_tokens)
    totals = {"total_tokens": 6, "total_sequences": 4, "constant": constant}
    return float(aggregate(of_token, SEQUENCE, how=config.aggregation, **totals))


def test_every_preset_has_a_number_by_hand():
    assert {file.stem for file in (builtin_folder() / "conf" / "rl").glob("*.yaml")} == LOSSES.keys()


@pytest.mark.parametrize("preset", LOSSES)
def test_a_presets_loss_is_the_one_by_hand(tmp_path, preset):
    config = load(tmp_path, preset, UNDISCLOSED.get(preset, {}))
    assert loss(config) == pytest.approx(LOSSES[preset], rel=1e-5)


@pytest.mark.parametrize("preset", UNDISCLOSED)
def test_what_a_report_does_not_disclose_is_asked_for(tmp_path, preset):
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, preset, {})
    asked = {problem.split(": ")[0] for problem in caught.value.problems if "required, and not set" in problem}
    assert asked == {f"stages.rl.config.{key}" for key in UNDISCLOSED[preset]}


def test_dapo_samples_dynamically_and_penalises_length(tmp_path):
    config = load(tmp_path, "dapo", UNDISCLOSED["dapo"])
    assert config.dynamic_sampling is not None
    assert (config.overlong.handling, config.overlong.buffer_tokens) == ("soft_penalty", 2)


def test_ultra_clips_its_advantages(tmp_path):
    assert load(tmp_path, "nemotron3_ultra", {}).max_advantage == 20.0


def test_another_form_takes_the_keys_of_the_presets_away_by_null(workspace):
    changed = "stages.reasoning.config.surrogate={form: cispo, high: 0.5}"
    with pytest.raises(ConfigError, match=r"surrogate\.low: unknown key .*taken away by low: null"):
        load_pipeline("glm5", [changed], workspace=workspace)
    surrogate = load_pipeline("glm5", [changed.replace("}", ", low: null}")], workspace=workspace)
    assert surrogate.stages["reasoning"].settings.config.surrogate == CispoSurrogate(form="cispo", high=0.5)


def test_null_takes_no_known_key_away(workspace):
    with pytest.raises(ConfigError, match=r"max_steps: must be a whole number, not null"):
        load_pipeline("glm5", ["stages.reasoning.config.train.max_steps=null"], workspace=workspace)
