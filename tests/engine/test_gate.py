"""The gate's questions to teachers: each fault is planted beside a healthy pair."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine import stages
from engine.peaked import ROUTES, model, nudged
from transformers import AutoModelForCausalLM

from opdctl.backends.contract import Stopped
from opdctl.engine import teacher_states
from opdctl.engine.checkpoint import new_policy, save_policy
from opdctl.engine.gate import check_models
from opdctl.engine.gate_pairs import judge_pair, judge_routes
from opdctl.engine.probe import Score, _Probe, read_pairs
from opdctl.settings import GateSettings, NewModel, OpdSettings
from opdctl.verdicts import Outcome, Verdict

SETTINGS = GateSettings(rollouts=8)
FULL = {"form": "full_vocab"}
OWN = OpdSettings.model_validate(
    {
        "data": {"tasks": ["math"]},
        "rollout": stages.ROLLOUT,
        "train": stages.train(4, 16),
        "loss": FULL,
        "route_by": ["domain"],
    }
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    policy, tokenizer = new_policy(NewModel.model_validate(stages.MODEL), 7)
    save_policy(policy, tokenizer, folder / "random", dtype=torch.float32)
    return {
        "student": model(folder / "student"),
        "healthy": model(folder / "healthy", change=nudged),
        "stranger": model(folder / "stranger", seed=3),
        "uniform": model(folder / "uniform", change=lambda policy: policy.head().zero_()),
        "random": folder / "random",
    }


def stage(folder: Path, made: dict[str, Path], last: str = "healthy", **config):
    """Of four teachers the last, of code at max, is another one."""
    teachers = dict.fromkeys(ROUTES, made["healthy"]) | {ROUTES[-1]: made[last]}
    return stages.opd(folder / "opd", made["student"], teachers, FULL, **config)


@pytest.fixture(scope="module")
def reading(tmp_path_factory, made):
    """Of the healthy teacher of code at max."""
    [found] = read_pairs(stage(tmp_path_factory.mktemp("reading"), made), SETTINGS, stages.Recorder(), [3])
    return found


def judged(spec, settings: GateSettings = SETTINGS) -> list[Verdict]:
    return check_models(spec, settings, stages.Recorder())


def alarms(found: list[Verdict]) -> set[tuple[str, str, str]]:
    return {(one.check, one.subject, str(one.outcome)) for one in found if one.outcome is not Outcome.GO}


@pytest.mark.parametrize("states", ["direct", "cached"])
def test_a_healthy_pair_passes_every_check(tmp_path, made, states):
    found = judged(stage(tmp_path, made, resources={"teacher_states": states}))
    assert not alarms(found)
    assert {one.check for one in found if one.subject == "sft -> max[domain=code]"} == {
        "random_teacher", "deterministic", "direct_forward", "distance", "entropy_gap", "topk_overlap", "headroom"
    }  # fmt: skip


PLANTED = {
    "random": ("random_teacher", "refuse"),
    "uniform": ("random_teacher", "refuse"),
    "stranger": ("distance", "cold start first"),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_teacher_is_named_and_no_other(tmp_path, made, fault):
    found = alarms(judged(stage(tmp_path, made, fault)))
    check, outcome = PLANTED[fault]
    assert (check, "sft -> max[domain=code]", outcome) in found
    assert {subject for _, subject, _ in found} == {"sft -> max[domain=code]"}


KNOWING = {  # nats above -ln V of the likeliest tokens of teacher and student
    "a teacher that knows": (3.0, 3.0, Outcome.GO),
    "random beside a trained student": (0.2, 3.0, Outcome.REFUSE),
    "both after a few steps": (0.3, 0.4, Outcome.WARN),
    "flat beside a student that knows nothing": (0.0, 0.0, Outcome.REFUSE),
    "no numbers": (float("nan"), 0.3, Outcome.REFUSE),
}


@pytest.mark.parametrize("case", KNOWING)
def test_a_teacher_that_knows_nothing_is_held_against_its_student(reading, case):
    theirs, mine, outcome = KNOWING[case]
    spread_N, uniform = torch.linspace(-1, 1.25, 50), -math.log(reading.vocabulary)  # the ninth tenth is at 1.0
    read = replace(
        reading,
        logprobs_N=uniform + theirs * spread_N,
        student_N=uniform + mine * spread_N,
        repeats_N=torch.zeros(50, dtype=torch.bool),
    )
    [found] = [one for one in judge_pair(read, SETTINGS, OWN) if one.check == "random_teacher"]
    assert found.outcome is outcome
    assert bool(found.remedy) == (outcome is not Outcome.GO)


def test_the_students_own_numbers_are_those_of_the_same_tokens(reading, tmp_path, made):
    """A teacher with the student's weights says what it says."""
    spec = stage(tmp_path, made | {"same": made["student"]}, "same")
    [same] = read_pairs(spec, SETTINGS, stages.Recorder(), [3])
    assert torch.allclose(same.student_N, same.logprobs_N, atol=1e-5)
    assert not torch.allclose(reading.student_N, reading.logprobs_N, atol=1e-2)


def test_a_teacher_without_a_row_among_those_looked_at_is_told_of(tmp_path, made):
    spec = stages.opd(tmp_path / "opd", made["student"], dict.fromkeys(ROUTES, made["healthy"]), FULL,
                      data={"tasks": ["math", "code"], "efforts": ["low"]})  # fmt: skip
    unasked = {one.subject: one for one in judged(spec) if not one.asked}
    assert set(unasked) == {"sft -> max[domain=math]", "sft -> max[domain=code]"}
    assert all(one.outcome is Outcome.GO and "routed to it" in one.evidence for one in unasked.values())


def test_a_far_teacher_that_samples_itself_is_warned_of(tmp_path, made):
    found = alarms(judged(stage(tmp_path, made, "stranger", sampled_by="teacher")))
    assert ("distance", "sft -> max[domain=code]", "warn") in found


def test_a_teacher_that_answers_otherwise_each_time_is_refused(tmp_path, made, monkeypatch):
    read = teacher_states.DirectStates.get

    def noisy(self, number, rows, *, then=None):
        hidden_NE, head_VE = read(self, number, rows, then=then)
        return hidden_NE + 0.01 * torch.randn_like(hidden_NE), head_VE

    monkeypatch.setattr(teacher_states.DirectStates, "get", noisy)
    assert ("deterministic", "sft -> max[domain=code]", "refuse") in alarms(judged(stage(tmp_path, made)))


def test_cached_states_that_are_not_the_models_are_refused(tmp_path, made, monkeypatch):
    whole = teacher_states._Checkpoint.head
    monkeypatch.setattr(teacher_states._Checkpoint, "head", lambda self: whole(self).roll(1, 0))
    found = alarms(judged(stage(tmp_path, made, resources={"teacher_states": "cached"})))
    assert ("direct_forward", "sft -> max[domain=code]", "refuse") in found


def test_branches_that_see_one_another_are_refused(tmp_path, made, monkeypatch):
    groups = {"rollout": stages.ROLLOUT | {"prompts": 2, "group_size": 4}}
    assert not alarms(judged(stage(tmp_path, made, **groups)))
    from opdctl.engine import batch

    monkeypatch.setattr(batch, "_tree_mask", lambda branch_BT: (branch_BT[:, None, :] >= 0)[:, None].repeat(
        branch_BT.shape[1], axis=2))  # fmt: skip
    found = alarms(judged(stage(tmp_path, made, **groups)))
    assert ("direct_forward", "sft -> max[domain=code]", "refuse") in found


def test_a_teacher_of_another_vocabulary_is_not_measured(tmp_path, made):
    words = [*stages.MODEL["tokenizer"]["words"], "more"]
    other = stages.MODEL | {"tokenizer": {"words": words}}
    save_policy(*new_policy(NewModel.model_validate(other), 0), tmp_path / "other", dtype=torch.float32)
    found = judged(stage(tmp_path, made | {"other": tmp_path / "other"}, "other"))
    [only] = [one for one in found if one.subject == "sft -> max[domain=code]"]
    assert only.outcome is Outcome.WARN
    assert "another vocabulary" in only.evidence


def test_numbers_are_those_of_a_slow_computation(tmp_path, made):
    spec = stage(tmp_path, made, "stranger")
    [reading] = read_pairs(spec, SETTINGS, stages.Recorder(), [3])
    probe = _Probe(spec, SETTINGS)
    sequences = probe.show(probe.rows([3])[3]).rollouts
    models = [AutoModelForCausalLM.from_pretrained(made[name]).double() for name in ("student", "stranger")]
    kl, shared, entropy = [], [], []
    for sequence in sequences:
        ids = torch.tensor([[*sequence.prompt, *sequence.completion]])
        with torch.no_grad():
            p, q = (one(input_ids=ids).logits[0].log_softmax(-1) for one in models)
        for at in range(len(sequence.prompt) - 1, ids.shape[1] - 1):
            kl.append(sum(float(a.exp() * (a - b)) for a, b in zip(p[at], q[at], strict=True)))
            entropy.append(-sum(float(b.exp() * b) for b in q[at]))
            tops = [set(x[at].argsort(descending=True)[:16].tolist()) for x in (p, q)]
            shared.append(len(tops[0] & tops[1]) / 16)
    assert reading.tokens == len(kl)
    assert reading.reverse_kl == pytest.approx(sum(kl) / len(kl), rel=1e-4)
    assert reading.teacher_entropy == pytest.approx(sum(entropy) / len(kl), rel=1e-4)
    assert reading.overlap == pytest.approx(sum(shared) / len(kl), abs=2e-3)


def test_each_teacher_is_asked_about_its_own_prompts(tmp_path, made):
    probe = _Probe(stage(tmp_path, made), SETTINGS)
    for number, rows in probe.rows(range(4)).items():
        assert len(rows) == 8
        assert {(row.task, row.prompt.columns["effort"]) for row in rows} == {ROUTES[number]}


def test_a_teacher_of_many_cells_is_asked_about_all_of_them(tmp_path, made):
    spec = stages.opd(tmp_path / "opd", made["student"], {("math", "low"): made["healthy"]}, FULL,
                      default_teacher="low[domain=math]")  # fmt: skip
    [rows] = _Probe(spec, SETTINGS).rows([0]).values()
    assert sorted({(row.task, row.prompt.columns["effort"]) for row in rows}) == sorted(ROUTES)


def test_training_after_the_gate_is_the_same_to_the_bit(tmp_path, made):
    ends = []
    for asked in (False, True):
        spec = stage(tmp_path / str(asked), made)
        before = torch.get_rng_state()
        if asked:
            judged(spec)
        assert torch.equal(torch.get_rng_state(), before)
        assert not Path(spec.state).exists()
        record = stages.Recorder()
        stages.run(spec, record)
        ends.append((Path(spec.output, "model.safetensors").read_bytes(), record.events))
    assert ends[0] == ends[1]


def test_a_stop_is_heard_between_teachers(tmp_path, made):
    class Control(stages.Recorder):
        def stop_requested(self):
            return True

    with pytest.raises(Stopped):
        check_models(stage(tmp_path, made), SETTINGS, Control())


def test_a_stage_of_verl_is_asked_the_same(tmp_path, made):
    found = judged(replace(stage(tmp_path, made, "random"), backend="verl"))
    assert ("random_teacher", "sft -> max[domain=code]", "refuse") in alarms(found)


EXCHANGES = {  # nats from the student: (first, second teacher) on the prompts of the first, and of the second
    "specialists": ((0.46, 0.04), (0.01, 0.14), False),
    "exchanged": ((0.04, 0.46), (0.14, 0.01), True),
    "one moved further everywhere": ((0.04, 0.4), (0.04, 0.4), False),
    "alike": ((0.1, 0.2), (0.2, 0.1), False),
}


@pytest.fixture(scope="module")
def strangers(tmp_path_factory, made):
    spec = stage(tmp_path_factory.mktemp("strangers"), made, "stranger")
    return list(read_pairs(spec, SETTINGS, stages.Recorder(), [1, 3]))


@pytest.mark.parametrize("case", EXCHANGES)
def test_two_exchanged_specialists_are_named(strangers, case):
    *moved, exchanged = EXCHANGES[case]
    first, second = strangers
    assert first.moved == pytest.approx({1: first.reverse_kl, 3: first.moved[3]})  # of so few rollouts all are read
    assert second.moved[1] > 2 * first.moved[1]  # a stranger is far on all prompts
    readings = [
        replace(first, moved={1: moved[0][0], 3: moved[1][0]}),
        replace(second, moved={1: moved[0][1], 3: moved[1][1]}),
    ]
    found = [(one.check, one.subject, one.outcome) for one in judge_routes(readings)]
    assert found == ([("routing", "sft -> max[domain=math]", Outcome.REFUSE)] if exchanged else [])


# ------------------------------------------------------------------------------------------------------- headroom

SCORES = [
    ((20, 0), (20, 0), Outcome.GO),  # (right, cut) of teacher and student, of 24 each
    ((12, 0), (16, 0), Outcome.GO),  # noise
    ((8, 0), (20, 0), Outcome.WARN),
    ((0, 24), (20, 0), Outcome.REFUSE),
    ((0, 0), (0, 0), Outcome.GO),
]


@pytest.mark.parametrize(("theirs", "mine", "outcome"), SCORES)
def test_a_teacher_worse_than_its_student_is_told(reading, theirs, mine, outcome):
    scored = replace(reading, teacher_score=Score(24, *theirs), student_score=Score(24, *mine))
    [found] = [one for one in judge_pair(scored, SETTINGS, OWN) if one.check == "headroom"]
    assert found.outcome is outcome
    shortened = SETTINGS.model_copy(update={"max_completion_tokens": 3})
    [found] = [one for one in judge_pair(scored, shortened, OWN) if one.check == "headroom"]
    assert (found.outcome is Outcome.GO) == (outcome is Outcome.GO or theirs[1] > 12)
