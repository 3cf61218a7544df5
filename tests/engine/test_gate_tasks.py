"""The gate's questions to graders, groups and demonstrations."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine import stages

from opdctl.backends.contract import InputSpec
from opdctl.engine import gate_tasks
from opdctl.engine.checkpoint import new_policy, save_policy
from opdctl.engine.gate import check_models
from opdctl.engine.gate_tasks import judge_grader
from opdctl.errors import StageFailed
from opdctl.settings import GateSettings, NewModel
from opdctl.tasks import Prompt
from opdctl.tasks import Verdict as Judged
from opdctl.verdicts import Outcome, Verdict

PROMPTS = [Prompt(f"what is {n}?", str(n), {}) for n in range(8)]


class Numbers:
    """A task whose right answers are `<answer>N</answer>`; `passes` is its grader."""

    def __init__(self, passes, knows=True):
        self.passes, self.knows = passes, knows

    def reference(self, prompt):
        return f"<answer>{prompt.answer}</answer>" if self.knows else None

    def verify(self, prompt, completion):
        right = self.passes(prompt, completion)
        return Judged(right, float(right))


def raises(prompt, completion):
    raise StageFailed("the grader fell over")


GRADERS = {
    "healthy": (lambda p, c: c == f"<answer>{p.answer}</answer>", True, Outcome.GO),
    "always wrong": (lambda p, c: False, True, Outcome.REFUSE),
    "always right": (lambda p, c: True, True, Outcome.REFUSE),
    "needs a tag nobody writes": (lambda p, c: "<final>" in c and p.answer in c, True, Outcome.REFUSE),
    "passes any tagged answer": (lambda p, c: "<answer>" in c, True, Outcome.REFUSE),
    "passes an empty answer": (lambda p, c: c in ("", f"<answer>{p.answer}</answer>"), True, Outcome.REFUSE),
    "fails one right answer": (lambda p, c: p.answer != "3" and f">{p.answer}<" in c, True, Outcome.WARN),
    "falls over": (raises, True, Outcome.REFUSE),
    "no reference answers": (lambda p, c: c.endswith(">"), False, Outcome.GO),
}


@pytest.mark.parametrize("case", GRADERS)
def test_a_grader_praises_right_answers_alone(case):
    passes, knows, outcome = GRADERS[case]
    found = judge_grader("numbers", Numbers(passes, knows), PROMPTS)
    assert found.outcome is outcome
    assert bool(found.remedy) == (outcome is not Outcome.GO)
    assert ("no reference answers" in found.evidence) == (not knows)


def test_a_reward_of_zero_for_right_answers_is_refused():
    task = Numbers(lambda p, c: False)
    task.verify = lambda prompt, completion: Judged(prompt.answer in completion, 0.0)
    assert judge_grader("numbers", task, PROMPTS).outcome is Outcome.REFUSE


# ---------------------------------------------------------------------------------------------- stages of the engine


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that ends its answers now and then, and is never right."""
    folder = tmp_path_factory.mktemp("models") / "fresh"
    save_policy(*new_policy(NewModel.model_validate(stages.MODEL), 0), folder, dtype=torch.float32)
    return folder


def asked(spec, **settings) -> dict[str, Verdict]:
    return {one.check: one for one in check_models(spec, GateSettings(**settings), stages.Recorder())}


def test_a_stage_without_any_difference_is_refused(tmp_path, fresh):
    found = asked(stages.rlvr(tmp_path / "rlvr", fresh, unfinished_reward=0.0))
    assert found["grader"].outcome is Outcome.GO
    assert found["difficulty"].outcome is Outcome.REFUSE
    assert found["difficulty"].values["prompts"] == 8 * (1 + gate_tasks.MORE)


def test_no_share_of_equal_groups_is_too_many_where_the_settings_say_so(tmp_path, fresh):
    found = asked(stages.rlvr(tmp_path / "rlvr", fresh, unfinished_reward=0.0), difficulty=1.0)
    assert found["difficulty"].outcome is Outcome.GO


def test_groups_that_differ_pass(tmp_path, fresh):
    rollout = stages.ROLLOUT | {"group_size": 16, "max_completion_tokens": 12}
    found = asked(stages.rlvr(tmp_path / "rlvr", fresh, unfinished_reward=-1.0, rollout=rollout))
    assert found["difficulty"].outcome is Outcome.GO
    assert found["difficulty"].values["tied"] < 0.95


def test_lengths_differ_where_they_are_rewarded(tmp_path, fresh):
    effort = {"tau": 1.0, "anneal": "hard", "budget": stages.BUDGET}
    rollout = stages.ROLLOUT | {"group_size": 16, "max_completion_tokens": 12}
    budget = (InputSpec("budget", "start", str(fresh)),)
    spec = stages.rlvr(tmp_path / "rlvr", fresh, inputs=budget, unfinished_reward=0.0, effort=effort, rollout=rollout)
    assert asked(spec)["difficulty"].outcome is Outcome.GO


def test_a_cut_of_the_gates_own_is_not_held_against_a_stage(tmp_path, fresh):
    found = asked(stages.rlvr(tmp_path / "rlvr", fresh, unfinished_reward=0.0), max_completion_tokens=2)
    assert found["difficulty"].outcome is Outcome.GO
    assert "not judged" in found["difficulty"].evidence


def test_the_gate_can_be_told_not_to_ask_for_differences(tmp_path, fresh):
    found = asked(stages.rlvr(tmp_path / "rlvr", fresh, unfinished_reward=0.0), difficulty_prompts=0)
    assert found["grader"].asked
    assert untold(found["difficulty"]) == "gate.difficulty_prompts is 0"


def untold(verdict: Verdict) -> str:
    """Why it was not asked."""
    assert (verdict.outcome, verdict.asked) == (Outcome.GO, False)
    return verdict.evidence.removeprefix("not asked: ")


def test_a_reward_by_a_model_is_not_asked_for_and_its_tasks_verifier_is_not_held_against_it(tmp_path, fresh):
    grader = {"tasks": ["math"], "mode": "rubric", "by": "actor", "template": "{prompt} {completion}"}
    grader |= {"verdicts": {"good": 1.0, "bad": 0.0}, "max_tokens": 2}
    found = asked(stages.rlvr(tmp_path / "rlvr", fresh, unfinished_reward=0.0, grader=grader))
    assert "a model grades it" in untold(found["grader"])
    assert "a model grades it" in untold(found["difficulty"])


def test_tasks_in_turns_and_those_of_lm_eval_are_not_asked_for_graders(tmp_path, fresh):
    rlvr = stages.rlvr(tmp_path / "rlvr", fresh)
    lm_eval = replace(rlvr, kind="eval", config={"harness": "lm_eval"})
    assert "graders of their own" in untold(asked(lm_eval)["grader"])
    [found] = gate_tasks.check_graders(replace(rlvr, tasks={"math": {"task": "lookup"}}), GateSettings())
    assert "in turns" in untold(found)


def test_what_a_task_without_reference_answers_praises_is_not_known():
    found = judge_grader("numbers", Numbers(lambda p, c: c.endswith(">"), knows=False), PROMPTS)
    assert not found.asked


@pytest.mark.parametrize(("answers", "outcome"), [("w3", Outcome.GO), ("", Outcome.REFUSE)])
def test_demonstrations_without_a_token_to_learn_are_refused(tmp_path, answers, outcome):
    from engine.models import WORDS

    rows = "".join(f'{{"q": "w{3 + i}", "a": "w3", "c": "{answers}"}}\n' for i in range(20))
    (tmp_path / "rows.jsonl").write_text(rows)
    task = {"task": "file", "path": str(tmp_path / "rows.jsonl"), "prompt": "q", "answer": "a", "completion": "c"}
    model = stages.MODEL | {"tokenizer": {"words": WORDS}}
    spec = replace(
        stages.sft(tmp_path / "sft"),
        tasks={"own": task | {"verifier": "exact", "held_out": 0.0}},
        config={"data": {"tasks": ["own"]}, "train": stages.train(2, 4)},
        new_model=model,
        efforts=None,
    )
    assert asked(spec)["loss_mask"].outcome is outcome
