"""Generative rewards: what a judge's verdicts are worth, and judges of all three kinds in real stages."""

import itertools
import json
from functools import partial
from pathlib import Path

import pytest
from engine.completions_server import completion, serving
from engine.models import tiny_policy
from engine.stages import EFFORTS, ROLLOUT, TASKS, Recorder, rlvr, run, sft, spec_of
from pydantic import ValidationError

from opdctl.backends.contract import InputSpec
from opdctl.engine import endpoint
from opdctl.engine.grader import GenerativeReward, open_grader
from opdctl.engine.rows import Renderer, Row
from opdctl.engine.sampling import sample
from opdctl.errors import StageFailed, StageRefused
from opdctl.settings import ChainTask, EffortSettings, Grader
from opdctl.tasks import Prompt, load_task

RUBRIC = {
    "tasks": ["math"],
    "mode": "rubric",
    "by": "actor",
    "template": "{prompt} : {completion}",
    "verdicts": {"good": 1.0, "not good": -0.5, "10": 0.25},
    "max_tokens": 3,
}
PAIRS = RUBRIC | {
    "mode": "pairwise",
    "template": "{prompt} : {first} : {second}",
    "verdicts": {"first": 1.0, "second": 0.0, "both": 0.5},
}


class Known:
    """A task whose answer to everything is what the prompt says."""

    def reference(self, prompt):
        return prompt.answer


def rewarding(settings, judge):
    """`judge(text)` -> what it writes."""
    asked = []

    def ask(prompts, keys):
        asked.append((list(prompts), list(keys)))
        return [judge(prompt.text) for prompt in prompts]

    reward = GenerativeReward(Grader.model_validate(settings), {"math": Known(), "code": Known()}, ask)
    return reward, asked


def rows(*tasks, messages=(), answer="42"):
    return [Row(task, Prompt(f"p{n}", answer, {}, messages), n, 0) for n, task in enumerate(tasks)]


# --------------------------------------------------------------------------------------------------------- rubric


def test_a_rubrics_reward_is_the_score_of_the_verdict():
    reward, asked = rewarding(RUBRIC, lambda text: {"a": "good", "b": "not good"}[text[-1]])
    graded = reward.grade(rows("math", "math"), ["a", "b", "b", "a"], 2)
    assert graded.rewards == {0: 1.0, 1: -0.5, 2: -0.5, 3: 1.0}
    assert [prompt.text for prompt in asked[0][0]] == ["p0 : a", "p0 : b", "p1 : b", "p1 : a"]


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("good", 1.0),
        ("I looked at it. Verdict: good.\n", 1.0),
        ("it is not good", -0.5),
        ("score 10", 0.25),
        ("**good**", 1.0),
    ],
)
def test_a_verdict_is_what_the_text_ends_with(text, score):
    reward, _ = rewarding(RUBRIC, lambda _: text)
    assert reward.grade(rows("math"), ["a"], 1).rewards == {0: score}


@pytest.mark.parametrize("text", ["", "good or bad", "nogood", "110", "Good", "1.10"])
def test_what_is_no_verdict_earns_the_lowest_score_and_is_counted(text):
    reward, _ = rewarding(RUBRIC, lambda _: text)
    graded = reward.grade(rows("math"), ["a"], 1)
    assert graded.rewards == {0: -0.5}
    assert graded.metrics([True])["unparsed"] == 1.0


def test_only_the_named_tasks_are_graded():
    reward, asked = rewarding(RUBRIC, lambda _: "good")
    assert reward.grade(rows("code", "math"), ["a", "b", "c", "d"], 2).rewards == {2: 1.0, 3: 1.0}
    assert len(asked[0][0]) == 2


def test_the_template_shows_the_tasks_own_answer():
    reward, asked = rewarding(RUBRIC | {"template": "{answer} {{x}} {completion}"}, lambda _: "good")
    reward.grade(rows("math"), ["a"], 1)
    assert asked[0][0][0].text == "42 {x} a"


def test_an_answer_that_the_task_does_not_know_is_refused():
    reward, _ = rewarding(RUBRIC | {"template": "{answer} {completion}"}, lambda _: "good")
    with pytest.raises(StageRefused, match="task math knows no answer"):
        reward.grade(rows("math", answer=None), ["a"], 1)


def test_a_completion_with_braces_is_shown_as_it_is():
    reward, asked = rewarding(RUBRIC, lambda _: "good")
    reward.grade(rows("math"), ["{answer} {"], 1)
    assert asked[0][0][0].text == "p0 : {answer} {"


def test_where_the_task_is_a_chat_the_judge_is_asked_by_chat():
    reward, asked = rewarding(RUBRIC, lambda _: "good")
    reward.grade(rows("math", messages=[{"role": "user", "content": "p0"}]), ["a"], 1)
    assert asked[0][0][0].messages == [{"role": "user", "content": "p0 : a"}]


def test_every_question_has_random_numbers_of_its_own():
    reward, asked = rewarding(PAIRS, lambda _: "first")
    reward.grade(rows("math", "math"), ["a"] * 8, 4)
    keys = asked[0][1]
    assert len(set(keys)) == len(keys) == 2 * 4 * 3


# ------------------------------------------------------------------------------------------------------- pairwise


def preferring(text):
    """The larger number; equal ones share."""
    _, first, second = text.split(" : ")
    return "both" if first == second else "first" if int(first) > int(second) else "second"


def test_a_tournament_by_hand():
    reward, _ = rewarding(PAIRS, preferring)
    graded = reward.grade(rows("math"), ["1", "3", "2"], 3)
    assert graded.rewards == {0: 0.0, 1: 1.0, 2: 0.5}


def test_the_reward_is_the_share_of_comparisons_won():
    reward, _ = rewarding(PAIRS, preferring)
    values = [5, 1, 1, 9, 2, 7, 7, 3]
    graded = reward.grade(rows("math", "math"), [str(value) for value in values], 4)
    for at, value in enumerate(values):
        others = [other for i, other in enumerate(values) if i // 4 == at // 4 and i != at]
        assert graded.rewards[at] == pytest.approx(sum((value > o) + (value == o) / 2 for o in others) / 3)


def test_a_judge_that_prefers_a_place_favours_no_completion():
    reward, _ = rewarding(PAIRS, lambda _: "first")
    assert set(reward.grade(rows("math"), list("abcd"), 4).rewards.values()) == {0.5}


def test_in_a_pair_without_a_verdict_neither_wins():
    reward, _ = rewarding(PAIRS, lambda text: "?" if "3" in text else preferring(text))
    graded = reward.grade(rows("math"), ["1", "2", "3"], 3)
    assert graded.rewards == {0: 0.0, 1: 0.5, 2: 0.0}
    assert graded.metrics([True] * 3)["unparsed"] == pytest.approx(4 / 6)


# ------------------------------------------------------------------------------------------------------ agreement


def test_agreement_of_a_rubric_counts_both_kinds_of_error():
    said = dict(zip("abcdef", ["good", "good", "not good", "not good", "10", "?"], strict=True))
    reward, _ = rewarding(RUBRIC, lambda text: said[text[-1]])
    graded = reward.grade(rows("math"), list("abcdef"), 6)
    counts = graded.agreement([True, False, True, False, True, False])
    assert (counts.right, counts.wrong) == (3, 3)
    assert (counts.false_rejects, counts.false_accepts) == (2, 1)  # "10" is 0.25, the middle of -0.5 and 1: no accept
    assert counts.unparsed == 1
    assert graded.metrics([True, False, True, False, True, False])["agreement"] == pytest.approx(3 / 6)


def test_agreement_of_a_tournament_is_over_the_pairs_that_the_rule_tells_apart():
    reward, _ = rewarding(PAIRS, lambda _: "first")
    counts = reward.grade(rows("math"), list("abc"), 3).agreement([True, False, False])
    assert (counts.right, counts.wrong, counts.verdicts) == (2, 2, 6)  # a before b and c, and after them
    assert (counts.false_rejects, counts.false_accepts) == (0, 2)  # a judge that always takes the first


# ------------------------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"template": "{prompt} {completion"}, "expected '}'"),
        ({"template": "{prompt}"}, "needs {completion}"),
        ({"template": "{completion} {first}"}, "not {first}"),
        ({"template": "{completion.__class__}"}, "not {completion.__class__}"),
        ({"mode": "pairwise", "template": "{first}"}, "needs {second}"),
        ({"verdicts": {"yes": 1.0, "no": 1.0}}, "same score"),
        ({"verdicts": {"yes": 1.0, " no": 0.0}}, "blanks"),
        ({"mode": "pairwise", "template": "{first} {second}", "verdicts": {"a": 2.0, "b": 0.0}}, "from 0 to 1"),
        ({"by": "endpoint"}, "needs `endpoint`"),
        ({"endpoint": {"url": "http://x/v1", "model": "m"}}, "no use for `endpoint`"),
        ({"by": "endpoint", "endpoint": {"url": "file:///etc/passwd", "model": "m"}}, "must begin with http"),
        ({"by": "endpoint", "endpoint": {"url": "http://user:key@x/v1", "model": "m"}}, "a user or a password"),
    ],
)
def test_settings_that_contradict_themselves_are_refused(changes, told):
    with pytest.raises(ValidationError) as caught:
        Grader.model_validate(RUBRIC | changes)
    assert told in str(caught.value)


# ----------------------------------------------------------------------------------------------------- real judges


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    spec = sft(tmp_path_factory.mktemp("start") / "sft", steps=60, train={"optimizer": {"lr": 1e-2}})
    run(spec)
    return Path(spec.output)


def chains():
    return load_task("math", ChainTask.model_validate(TASKS["math"]), EffortSettings.model_validate(EFFORTS))


def grader(**changes):
    """Any number of the chain's as a verdict: for a judge that never learnt to judge."""
    verdicts = {str(n): float(n >= 3) for n in range(7)}
    return RUBRIC | {"template": "{prompt} {completion}", "verdicts": verdicts, "max_tokens": 2} | changes


def by_rule(path, payload, number):
    """A server whose judge is the chain's own rule."""
    problem, _, answer = payload["prompt"].partition(" : ")
    _, *ops, _, first = problem.split()
    verdict = chains().verify(Prompt("", (first, ops), {}), answer)
    return completion("It follows. good" if verdict.correct else "It does not. not good")


@pytest.mark.parametrize("tokens", [1, 1000])
def test_the_actor_judges_greedily_by_its_own_weights_in_calls_of_any_size(tmp_path, tokens):
    policy, tokenizer = tiny_policy()
    renderer = Renderer(tokenizer, policy.eos_ids)
    spec = spec_of(tmp_path / "rl", "rlvr", {}, [], resources={"micro_batch_tokens": tokens})
    settings = Grader.model_validate(grader(max_tokens=3, verdicts={"w3": 1.0, "w4": 0.0}))
    judge = open_grader(spec, settings, {}, partial(sample, policy), renderer).judge
    asked = [Prompt("w3 w4 w9", None, {}), Prompt("w7", None, {}), Prompt("w5 w3", None, {})]
    options = {"group_size": 1, "max_completion_tokens": 3, "temperature": 1.0, "top_p": 1.0, "top_k": 0}
    drawn = sample(policy, renderer.prompts(asked, 99), **options, seed=5, keys=[7, 8, 9], greedy=True)
    assert judge(asked, [1, 2, 3]) == renderer.texts(drawn.completions)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"verdicts": {"w3": 1.0, "good": 0.0}}, "config.grader.verdicts: 'good' is not in the vocabulary"),
        ({"template": "{prompt} is {completion}"}, "config.grader.template: 'is' is not in the vocabulary"),
    ],
)
def test_words_that_the_judge_can_never_read_or_write_are_refused(tmp_path, changes, told):
    policy, tokenizer = tiny_policy()
    spec = spec_of(tmp_path / "rl", "rlvr", {}, [])
    settings = Grader.model_validate(grader(**({"verdicts": {"w3": 1.0, "w4": 0.0}} | changes)))
    with pytest.raises(StageRefused, match=told):
        open_grader(spec, settings, {}, partial(sample, policy), Renderer(tokenizer, policy.eos_ids))


def test_rewards_of_a_judge_that_agrees_with_the_rule_train_as_the_rule_does(tmp_path, start, monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    ruled = rlvr(tmp_path / "rule", start, steps=4)
    run(ruled)
    with serving(by_rule) as (url, asked):
        judge = RUBRIC | {"by": "endpoint", "verdicts": {"good": 1.0, "not good": 0.0}}
        judged = rlvr(tmp_path / "judge", start, steps=4, grader=judge | {"endpoint": {"url": url, "model": "rule"}})
        told = Recorder()
        run(judged, told)
    assert Path(judged.output, "model.safetensors").read_bytes() == Path(ruled.output, "model.safetensors").read_bytes()
    assert len(asked) == 2 * ROLLOUT["prompts"] * ROLLOUT["group_size"]
    assert all(metrics["unparsed"] == 0 and metrics["grader_score"] >= 0 for _, metrics in told.events)


def test_a_server_that_is_gone_fails_the_stage(tmp_path, start, monkeypatch):
    monkeypatch.setattr(endpoint, "FIRST_PAUSE_S", 0.0)
    with serving(by_rule) as (url, _):
        pass
    there = {"url": url, "model": "rule", "attempts": 2}
    with pytest.raises(StageFailed, match="did not answer after 2 attempts"):
        run(rlvr(tmp_path / "gone", start, grader=grader(by="endpoint", endpoint=there)))


@pytest.mark.parametrize("mode", ["rubric", "pairwise"])
@pytest.mark.parametrize("by", ["actor", "model"])
def test_a_model_as_judge_gives_the_same_run_twice(tmp_path, start, by, mode):
    template = {"template": "{prompt} {first} {second}"} if mode == "pairwise" else {}
    judge = grader(by=by, mode=mode, temperature=1.0, **template)
    given = (InputSpec("grader", "judge", str(start)),) if by == "model" else ()
    recorders = Recorder(), Recorder()
    for number, recorder in enumerate(recorders):
        run(rlvr(tmp_path / str(number), start, steps=4, inputs=given, grader=judge), recorder)
    assert recorders[0].events == recorders[1].events
    assert all({"grader_score", "unparsed", "agreement"} <= metrics.keys() for _, metrics in recorders[0].events)


def test_evaluation_tells_how_far_a_judge_agrees_with_the_rule(tmp_path, start, monkeypatch):
    """A judge that is always for: every wrong answer is a false accept."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    config = {
        "data": {"tasks": ["math", "code"], "efforts": ["low", "max"]},
        "rollout": ROLLOUT | {"prompts": 20, "group_size": 2},
    }
    models = [InputSpec("models", name, str(start)) for name in ("a", "b")]
    with serving(lambda *_: completion("good")) as (url, _):
        judge = RUBRIC | {"by": "endpoint", "endpoint": {"url": url, "model": "kind"}}
        spec = spec_of(tmp_path / "eval", "eval", config | {"grader": judge}, models)
        result = run(spec)
    plain = spec_of(tmp_path / "plain", "eval", config, models)
    run(plain)
    report, without = (json.loads(Path(s.output, "report.json").read_text()) for s in (spec, plain))
    for model, cell in itertools.product("ab", report["cells"]):
        counts = report["models"][model][cell]
        told = counts.pop("grader")
        assert counts == {k: v for k, v in without["models"][model][cell].items() if k != "grader"}
        if cell.startswith("code"):
            assert told is None
            continue
        assert (told["right"], told["wrong"]) == (counts["correct"], 40 - counts["correct"])
        assert told["false_accept_rate"]["value"] == 1
        assert told["agreement"]["value"] == pytest.approx(counts["correct"] / 40)
        assert told["agreement"]["low"] < told["agreement"]["value"] < told["agreement"]["high"]
        assert result.metrics[f"{model}/{cell}/agreement"] == told["agreement"]["value"]
