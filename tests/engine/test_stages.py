"""Properties of the stages through `embedded.run`: resume to the bit, accumulation, budgets, refusals."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from engine.stages import BUDGET, ROLLOUT, Recorder, opd, rlvr, run, sft, spec_of, train
from safetensors.torch import load_file

from opdctl.backends.contract import InputSpec, StageSpec, Stopped
from opdctl.errors import StageFailed, StageRefused

FORMS = {
    "policy_gradient": {"form": "policy_gradient", "max_advantage": 5.0},
    "topk": {"form": "topk", "k": 8},
    "full_vocab": {"form": "full_vocab"},
}


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that has seen a little SFT: its rollouts end, and groups disagree."""
    spec = sft(tmp_path_factory.mktemp("start") / "sft", steps=60, train={"optimizer": {"lr": 1e-2}})
    run(spec)
    return Path(spec.output)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    spec = sft(tmp_path_factory.mktemp("other") / "sft", steps=40, seed=1, train={"optimizer": {"lr": 1e-2}})
    run(spec)
    return Path(spec.output)


def teachers(first: Path, second: Path) -> dict[tuple[str, str], Path]:
    return {("math", "low"): first, ("math", "max"): second, ("code", "low"): second, ("code", "max"): first}


def weights(spec: StageSpec) -> bytes:
    return Path(spec.output, "model.safetensors").read_bytes()


def build(kind: str, folder: Path, start: Path, other: Path) -> StageSpec:
    if kind == "sft":
        return sft(folder)
    if kind == "rlvr":
        effort = {"tau": 0.8, "tau_from": 1.2, "budget": BUDGET}
        cold = InputSpec("budget", "sft", str(start))
        sampling = {"max_rounds": 3}
        return rlvr(folder, start, inputs=(cold,), effort=effort, dynamic_sampling=sampling)
    return opd(folder, start, teachers(start, other), FORMS["full_vocab"])


@pytest.mark.parametrize("kind", ["sft", "rlvr", "opd"])
@pytest.mark.parametrize("stop_at", [1, 3])
def test_a_stopped_stage_ends_as_an_undisturbed_one(tmp_path, start, other, kind, stop_at):
    whole, cut = build(kind, tmp_path / "whole", start, other), build(kind, tmp_path / "cut", start, other)
    undisturbed, first, second = Recorder(), Recorder(stop_at), Recorder()
    result = run(whole, undisturbed)
    with pytest.raises(Stopped):
        run(cut, first)
    resumed = run(cut, second)
    assert weights(cut) == weights(whole)
    assert resumed == result or resumed.metrics.keys() == result.metrics.keys()
    assert first.events + second.events == undisturbed.events


@pytest.mark.parametrize("kind", ["sft", "rlvr", "opd"])
def test_a_stage_killed_between_saves_repeats_its_steps_exactly(tmp_path, start, other, kind, monkeypatch):
    whole, cut = build(kind, tmp_path / "whole", start, other), build(kind, tmp_path / "cut", start, other)
    undisturbed, first, second = Recorder(), Recorder(), Recorder()
    run(whole, undisturbed)

    class Killed(BaseException):
        pass

    def dying(step, total, metrics, phase="train"):
        if len(first.events) == len(undisturbed.events) - 1:
            raise Killed
        Recorder.emit(first, step, total, metrics, phase)

    monkeypatch.setattr(first, "emit", dying)
    with pytest.raises(Killed):
        run(cut, first)
    run(cut, second)
    assert weights(cut) == weights(whole)
    assert dict(first.events) | dict(second.events) == dict(undisturbed.events)


@pytest.mark.parametrize("kind", ["sft", "rlvr", "opd"])
def test_small_micro_batches_give_the_same_step(tmp_path, start, other, kind):
    """Only rounding may differ between one micro-batch and many."""

    def after(tokens: int) -> dict[str, torch.Tensor]:
        folder, resources = tmp_path / str(tokens), {"micro_batch_tokens": tokens}
        if kind == "sft":
            spec = sft(folder, steps=1, resources=resources)
        elif kind == "rlvr":
            spec = rlvr(folder, start, steps=2, resources=resources, aggregation="sequence_mean")
        else:
            config = {"train": train(1, 8), "resources": resources}
            spec = opd(folder, start, teachers(start, other), FORMS["policy_gradient"], **config)
        run(spec)
        return load_file(Path(spec.output, "model.safetensors"))

    whole, parts = after(16_384), after(24)
    moved = max(float((whole[name] - parts[name]).abs().max()) for name in whole)
    assert moved < 1e-4


def test_training_lowers_the_loss(tmp_path):
    record = Recorder()
    run(sft(tmp_path / "sft", steps=40, train={"optimizer": {"lr": 1e-2}}), record)
    losses = [metrics["loss"] for _, metrics in record.events]
    assert sum(losses[-5:]) < 0.75 * sum(losses[:5])


def test_the_budget_overrides_correctness(tmp_path, start):
    """tau near 0: every completion is over budget, so every reward is -1 and nothing can be learnt."""
    effort = {"tau": 0.01, "anneal": "hard", "budget": BUDGET}
    spec = rlvr(tmp_path / "rl", start, inputs=(InputSpec("budget", "sft", str(start)),), effort=effort)
    record = Recorder()
    run(spec, record)
    assert {metrics["reward"] for _, metrics in record.events} == {-1.0}
    assert {metrics["over_budget"] for _, metrics in record.events} == {1.0}
    assert max(metrics["accuracy"] for _, metrics in record.events) > 0
    assert weights(spec) == Path(start, "model.safetensors").read_bytes()


def test_dynamic_sampling_asks_until_groups_disagree(tmp_path, start):
    one, many = Recorder(), Recorder()
    run(rlvr(tmp_path / "one", start, dynamic_sampling={"max_rounds": 1}), one)
    run(rlvr(tmp_path / "many", start, dynamic_sampling={"max_rounds": 4}), many)
    assert {metrics["sampling_rounds"] for _, metrics in one.events} == {1.0}
    assert max(metrics["sampling_rounds"] for _, metrics in many.events) > 1


def test_rl_refuses_a_reference_that_means_other_words_by_the_ids(tmp_path, start):
    other = tmp_path / "other"
    shutil.copytree(start, other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    words = tokenizer["model"]["vocab"]
    first, second = list(words)[10:12]
    words[first], words[second] = words[second], words[first]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    record = Recorder()
    kl = {"estimator": "k3", "coef": 0.1, "placement": "loss"}
    spec = rlvr(tmp_path / "rl", start, inputs=(InputSpec("reference", "old", str(other)),), kl=kl)
    with pytest.raises(StageRefused, match="reference old has another vocabulary than the policy: id 10"):
        run(spec, record)
    assert record.events == []


def test_kl_to_the_reference_holds_the_policy_back(tmp_path, start):
    reference = (InputSpec("reference", "sft", str(start)),)

    def distance(coef: float) -> float:
        kl = {"estimator": "k3", "coef": coef, "placement": "loss"} if coef else {"estimator": "none"}
        spec = rlvr(tmp_path / str(coef), start, steps=16, inputs=reference if coef else (), kl=kl)
        run(spec)
        ours, theirs = load_file(Path(spec.output, "model.safetensors")), load_file(start / "model.safetensors")
        return sum(float((ours[name] - theirs[name]).square().sum()) for name in ours)

    assert distance(50.0) < 0.7 * distance(0.0)


@pytest.mark.parametrize("form", FORMS)
def test_a_student_that_is_its_own_teacher_stays_where_it_is(tmp_path, start, form):
    record = Recorder()
    spec = opd(tmp_path / "opd", start, teachers(start, start), FORMS[form], health_topk=4)
    run(spec, record)
    for _, metrics in record.events:
        assert metrics["reverse_kl"] == pytest.approx(0, abs=1e-6)
        assert metrics["entropy_gap"] == pytest.approx(0, abs=1e-6)
        assert metrics["overlap"] > 0.99
        assert metrics["grad_norm"] < 1e-4


@pytest.mark.parametrize("form", FORMS)
def test_distillation_brings_the_student_to_its_teacher(tmp_path, start, other, form):
    record = Recorder()
    spec = opd(
        tmp_path / "opd", start, teachers(other, other), FORMS[form], train=train(100, 8, optimizer={"lr": 5e-3})
    )
    run(spec, record)
    gaps = [metrics["reverse_kl"] for _, metrics in record.events]
    assert sum(gaps[-10:]) < 0.6 * sum(gaps[:10])


def test_one_resident_teacher_gives_the_same_student_as_many(tmp_path, start, other):
    digests = set()
    for resident in (1, 2, 4):
        spec = opd(
            tmp_path / str(resident),
            start,
            teachers(start, other),
            FORMS["full_vocab"],
            resources={"resident_teachers": resident},
        )
        run(spec)
        digests.add(weights(spec))
    assert len(digests) == 1


def test_a_non_finite_loss_stops_with_the_batch_recorded(tmp_path):
    """A learning rate beyond reason; the weights on disk are those before the refused step."""
    spec = sft(tmp_path / "sft", steps=50, train={"optimizer": {"lr": 1e30, "warmup_steps": 0}})
    with pytest.raises(StageFailed, match=r"(loss|grad_norm) is (nan|inf) at step \d+") as refused:
        run(spec)
    records = list(Path(spec.state).glob("refused-step-*.safetensors"))
    assert len(records) == 1
    assert str(records[0]) in refused.value.hint
    assert load_file(records[0])["ids"].numel() > 0
    assert not Path(spec.output, "model.safetensors").exists()


def test_a_prompt_that_is_too_long_is_refused_not_cut(tmp_path, start):
    spec = rlvr(tmp_path / "rl", start, rollout=ROLLOUT | {"max_prompt_tokens": 5})
    with pytest.raises(StageRefused, match=r"7 tokens and config.rollout.max_prompt_tokens is 5"):
        run(spec)


def exam(folder: Path, models: list[InputSpec], resources: dict[str, int] | None = None, **more: object) -> StageSpec:
    config = {
        "data": {"tasks": ["math", "code"], "efforts": ["low", "max"]},
        "rollout": ROLLOUT | {"prompts": 20, "group_size": 2},
        "pass_k": [1, 2],
        "within": {"tau": {"low": 0.8, "max": 1.2}, "budget": BUDGET},
        **more,
    }
    return spec_of(folder, "eval", config, models, resources=resources or {})


def test_evaluation_counts_every_model_and_cell(tmp_path, start, other):
    routed = [
        InputSpec("teachers", f"{effort}[domain={domain}]", str(other), {"domain": domain, "effort": effort})
        for domain in ("math", "code")
        for effort in ("low", "max")
    ]
    before, after = InputSpec("before", "sft", str(start)), InputSpec("after", "mopd", str(other))
    spec = exam(tmp_path / "eval", [before, *routed, after])
    result = run(spec)
    report = json.loads(Path(spec.output, "report.json").read_text())
    assert result.step == 6
    assert report["cells"] == ["math.low", "math.max", "code.low", "code.max"]
    counts = report["models"]["mopd"]["math.max"]
    assert counts["n"] == 40
    assert 0 <= counts["within"] <= counts["correct"] <= 40
    assert counts["pass_k"]["1"] <= counts["pass_k"]["2"]
    table = next(table for table in report["fusion"] if table["metric"] == "accuracy")
    for row in table["rows"]:  # the student after is the teacher: no difference in any cell
        assert row["delta"]["value"] == 0
        assert row["delta"]["low"] < 0 < row["delta"]["high"]


def test_a_stopped_evaluation_keeps_what_it_has_scored(tmp_path, start, other):
    models = [InputSpec("models", "a", str(start)), InputSpec("models", "b", str(other))]
    whole, cut = exam(tmp_path / "whole", models), exam(tmp_path / "cut", models)
    run(whole)
    with pytest.raises(Stopped):
        run(cut, Recorder(1))
    kept = {path: path.stat().st_mtime_ns for path in Path(cut.state).iterdir()}
    run(cut)
    for name in ("report.json", "outcomes.jsonl"):
        assert Path(cut.output, name).read_text() == Path(whole.output, name).read_text()
    assert all(path.stat().st_mtime_ns == when for path, when in kept.items())


def test_within_a_model_an_evaluation_tells_how_far_it_is_and_can_be_stopped(tmp_path, start, monkeypatch):
    monkeypatch.setattr("opdctl.engine.eval.TELL_S", 0)
    models, calls = [InputSpec("models", "a", str(start))], {"micro_batch_tokens": 320}
    whole, cut = (exam(tmp_path / name, models, resources=calls) for name in ("whole", "cut"))
    told: list[tuple[int, str]] = []

    class Phases(Recorder):
        def emit(self, step, total, metrics, phase="train"):
            told.append((step, phase))
            super().emit(step, total, metrics, phase)

    run(whole, Phases())
    assert [step for step, phase in told[:-1]] == [0] * (len(told) - 1)
    done = [int(phase.removeprefix("a ").removesuffix("/160")) for _, phase in told[:-1]]
    assert (done == sorted(set(done)), done[-1], told[-1]) == (True, 160, (1, "a"))
    assert len(done) > 5
    with pytest.raises(Stopped):
        run(cut, Recorder(stop_at=0))
    run(cut)
    for name in ("report.json", "outcomes.jsonl"):
        assert Path(cut.output, name).read_text() == Path(whole.output, name).read_text()
