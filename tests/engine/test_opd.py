"""Distillation stages through `embedded.run`: every form and option, resumed to the bit."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine.stages import ROLLOUT, Recorder, opd, run, sft, train
from safetensors.torch import load_file

from opdctl.backends.contract import InputSpec, StageSpec, Stopped
from opdctl.engine import opd_rollouts

GROUPS = {"rollout": ROLLOUT | {"prompts": 4, "group_size": 4}, "train": train(4, 16)}
PG = {"form": "policy_gradient", "max_advantage": 5.0}
ICEPOP = {"rule": "icepop", "low": 0.5, "high": 2.0, "policy": "current"}
CASES: dict[str, tuple[dict, dict]] = {
    "forward_kl": ({"form": "forward_kl"}, {}),
    "jsd": ({"form": "jsd", "beta": 0.5}, {}),
    "minillm": ({"form": "minillm", "discount": 0.9}, {}),
    "overlap": ({"form": "overlap", "k": 8}, {}),
    "unclipped": (PG | {"max_advantage": None, "surrogate": {"form": "reinforce"}}, {}),
    "mimo": (PG | {"surrogate": {"form": "reinforce"}, "mismatch": ICEPOP, "outcome_weight": 0.3}, GROUPS),
    "g-opd": (PG | {"teacher_scale": 1.25}, {}),
    "tml": (PG | {"discount": 0.9, "surrogate": {"form": "cispo", "high": 0.3}}, {"train": train(4, 4)}),
    "uni-opd": (PG | {"margin": {"margin": 0.4}}, GROUPS | {"balance": True}),
    "off-policy": ({"form": "full_vocab"}, {"sampled_by": "teacher"}),
    "effopd": ({"form": "topk", "k": 8}, {"extrapolation": {"steps": [1, 2, 4], "scales": [2.0, 4.0], "prompts": 8}}),
    "cached": ({"form": "full_vocab"}, {"resources": {"teacher_states": "cached"}}),
}  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A student that has seen a little SFT, and another model to teach it."""
    folder = tmp_path_factory.mktemp("models")
    specs = [sft(folder / str(seed), steps=60, seed=seed, train={"optimizer": {"lr": 1e-2}}) for seed in (0, 1)]
    for spec in specs:
        run(spec)
    return Path(specs[0].output), Path(specs[1].output)


def stage(folder: Path, case: str, student: Path, other: Path, **config) -> StageSpec:
    loss, options = CASES[case]
    both = {("math", "low"): student, ("math", "max"): other, ("code", "low"): other, ("code", "max"): other}
    spec = opd(folder, student, both, loss, **(options | config))
    reference = [InputSpec("reference", "sft", str(student))] if "teacher_scale" in loss else []
    return replace(spec, inputs=[*spec.inputs, *reference])


def weights(spec: StageSpec) -> bytes:
    return Path(spec.output, "model.safetensors").read_bytes()


@pytest.mark.parametrize("case", CASES)
def test_a_stopped_stage_ends_as_an_undisturbed_one(tmp_path, models, case):
    whole, cut = (stage(tmp_path / name, case, *models) for name in ("whole", "cut"))
    undisturbed, first, second = Recorder(), Recorder(2), Recorder()
    run(whole, undisturbed)
    with pytest.raises(Stopped):
        run(cut, first)
    run(cut, second)
    assert weights(cut) == weights(whole) != Path(models[0], "model.safetensors").read_bytes()
    assert first.events + second.events == undisturbed.events


@pytest.mark.parametrize("case", ["forward_kl", "jsd", "minillm", "g-opd", "tml", "off-policy"])
def test_distillation_brings_the_student_to_its_teacher(tmp_path, models, case):
    record, options = Recorder(), {"rollout": ROLLOUT | {"prompts": 16, "group_size": 1}}
    run(stage(tmp_path / "opd", case, *models, train=train(32, 16, optimizer={"lr": 5e-3}), **options), record)
    gaps = [metrics["reverse_kl"] for _, metrics in record.events]
    assert sum(gaps[-6:]) < 0.7 * sum(gaps[:6])


def test_the_first_event_tells_the_initial_distance(tmp_path, models):
    """Of student and teacher as they came, on the student's own completions: the same for every form."""
    found = set()
    for case in ("forward_kl", "jsd", "overlap", "unclipped"):
        record = Recorder()
        run(stage(tmp_path / case, case, *models), record)
        found.add(round(record.events[0][1]["reverse_kl"], 5))
    assert len(found) == 1
    assert found.pop() > 0.05


@pytest.mark.parametrize("case", ["mimo", "uni-opd"])
def test_the_verifiers_word_is_told(tmp_path, models, case):
    record = Recorder()
    run(stage(tmp_path / "opd", case, *models), record)
    name = {"mimo": "outcome_advantage", "uni-opd": "margin_shift"}[case]
    for _, metrics in record.events:
        assert metrics["reward"] == metrics["accuracy"]  # a chain earns 1 or 0
        assert metrics[name] >= 0
    assert max(metrics[name] for _, metrics in record.events) > 0


def test_an_outcome_alone_moves_a_student_that_is_its_own_teacher(tmp_path, models):
    moved = {}
    for weight in (0.0, 0.5):
        loss = PG | {"outcome_weight": weight}
        same = {(domain, effort): models[0] for domain in ("math", "code") for effort in ("low", "max")}
        spec = opd(tmp_path / str(weight), models[0], same, loss, **GROUPS)
        run(spec)
        before, after = load_file(models[0] / "model.safetensors"), load_file(Path(spec.output, "model.safetensors"))
        moved[weight] = max(float((before[name] - after[name]).abs().max()) for name in before)
    assert moved[0.5] > 5 * moved[0.0]


def test_balance_leaves_as_many_right_as_wrong(tmp_path, models):
    record = Recorder()
    run(stage(tmp_path / "opd", "uni-opd", *models), record)
    for _, metrics in record.events:
        right, size = round(metrics["accuracy"] * 16), 16
        kept = 2 * min(right, size - right) or size
        assert metrics["left_out"] == pytest.approx(1 - kept / size)


def test_each_teacher_samples_its_own_rows(tmp_path, models):
    student, other = models
    routes = {(domain, effort): other for domain in ("math", "code") for effort in ("low", "max")}
    first = {}
    for name, taught in (("own", student), ("other", other)):
        record = Recorder()
        run(opd(tmp_path / name, taught, routes, {"form": "full_vocab"}, sampled_by="teacher"), record)
        first[name] = record.events[0][1]
    assert first["own"]["accuracy"] == first["other"]["accuracy"]  # one teacher's completions, whoever learns
    assert first["own"]["length"] == first["other"]["length"]
    assert first["other"]["reverse_kl"] == pytest.approx(0, abs=1e-6)


def test_a_scale_of_one_is_the_teacher_itself(tmp_path, models):
    """Just beside 1 the reference is read and hardly changes the student."""
    ends = []
    for scale in (1.0, 1.0 + 1e-6):
        spec = stage(tmp_path / str(scale), "g-opd", *models)
        run(replace(spec, config=spec.config | {"loss": PG | {"teacher_scale": scale}}))
        ends.append(load_file(Path(spec.output, "model.safetensors")))
    assert max(float((ends[0][name] - ends[1][name]).abs().max()) for name in ends[0]) < 1e-4


def test_old_log_probabilities_of_the_trainer_are_those_of_the_sampler(tmp_path, models):
    """Same weights, same engine: hardly any token is masked, and the ratio is 1."""
    record = Recorder()
    run(stage(tmp_path / "opd", "mimo", *models), record)
    for _, metrics in record.events:
        assert metrics["mismatch_fraction"] == 0
        assert metrics["mismatch_ratio"] == pytest.approx(1, abs=1e-4)


def test_small_micro_batches_give_the_same_step(tmp_path, models):
    """Only rounding may differ; margins are computed over parts of a batch as well."""
    ends: list[dict[str, torch.Tensor]] = []
    for tokens in (16_384, 40):
        config = {"train": train(1, 16), "resources": {"micro_batch_tokens": tokens}}
        spec = stage(tmp_path / str(tokens), "uni-opd", *models, **config)
        run(spec)
        ends.append(load_file(Path(spec.output, "model.safetensors")))
    assert max(float((ends[0][name] - ends[1][name]).abs().max()) for name in ends[0]) < 1e-4


def test_a_mismatch_rule_compares_the_trainer_with_the_sampler(tmp_path, models, monkeypatch):
    """pi_old is computed again by the trainer: were it e^-0.5 of what the sampler gave, that would be the ratio."""
    own = opd_rollouts.completion_logprobs
    monkeypatch.setattr(
        opd_rollouts, "completion_logprobs", lambda *given, **more: [part - 0.5 for part in own(*given, **more)]
    )
    record = Recorder()
    spec = stage(tmp_path / "opd", "mimo", *models, train=train(1, 16))
    rule = {"rule": "tis", "cap": 2.0, "floor": 0.7}
    run(replace(spec, config=spec.config | {"loss": PG | {"mismatch": rule}}), record)
    ((_, metrics),) = record.events
    assert metrics["mismatch_ratio"] == pytest.approx(math.exp(-0.5), abs=1e-4)
    assert metrics["mismatch_fraction"] == 1.0
