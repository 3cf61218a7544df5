"""The two tasks in turns of the laptop recipe."""

import json
from collections import defaultdict

import pytest

from opdctl.errors import ConfigError
from opdctl.settings import EffortSettings, LookupTask, RepairTask
from opdctl.tasks import Demonstration, load_task
from opdctl.tasks.call_formats import call_format
from opdctl.tasks.environment import EnvironmentTask

EFFORTS = EffortSettings(by="control_token", levels={"low": "<low>", "high": "<high>", "max": "<max>"})
LEVELS = ["low", "high", "max"]
WORDS = call_format(None)
CLEAN = {"misread": 0.0, "noise": 0.0, "fumble": 0.0, "obey": 1.0}


def lookup(**settings):
    return load_task("tool_users", LookupTask(task="lookup", **settings), EFFORTS)


def repair(**settings):
    return load_task("fixers", RepairTask(task="repair", **settings), EFFORTS)


def replayed(task, shown: Demonstration):
    """The demonstration acted out, word by word."""
    episode = task.environment(shown.prompt, WORDS)
    written = []
    for turn in shown.turns:
        written.append(WORDS.render(turn.text, turn.calls))
        assert episode.step(written[-1]).observation == turn.observation
    return episode.verdict(), written


@pytest.mark.parametrize("task", [lookup(), repair()])
def test_demonstrations_show_what_the_environment_answers(task):
    assert isinstance(task, EnvironmentTask)
    for shown in task.demonstrations(0, 0, 60, LEVELS):
        verdict, _ = replayed(task, shown)
        assert shown.turns[-1].observation == ""
        assert "not ended" not in verdict.details["reason"]


@pytest.mark.parametrize("task", [lookup(**CLEAN), repair(**CLEAN)])
def test_a_careful_writer_is_right_where_he_looks_and_longer_at_more_effort(task):
    right, lengths = defaultdict(list), defaultdict(list)
    for shown in task.demonstrations(0, 0, 300, LEVELS):
        verdict, written = replayed(task, shown)
        right[shown.prompt.columns["effort"]].append(verdict.correct)
        lengths[shown.prompt.columns["effort"]].append(sum(len(text.split()) + 1 for text in written))
    assert sum(right["max"]) / 100 > 0.95
    assert sum(right["low"]) <= sum(right["high"]) <= sum(right["max"])
    low, high, most = (sum(lengths[effort]) / 100 for effort in LEVELS)
    # budgets of the recipe, on a prompt's longest answer at `max`: 0.55 and 0.80
    assert low <= 0.55 * most
    assert high <= 0.8 * most


def test_the_sloppy_writer_leaves_much_to_gain():
    for task in (lookup(), repair()):
        verdicts = [replayed(task, shown)[0].correct for shown in task.demonstrations(0, 0, 900, LEVELS)]
        assert 0.5 < sum(verdicts) / 900 < 0.85


def test_a_looked_up_chain_by_hand():
    problem = {"content": "", "store": dict.fromkeys("abcdefg", "+1") | {"b": "*2"}, "keys": ["b", "d"], "start": "3"}
    episode = lookup(keys=2).episode(problem, WORDS)
    assert episode.step("<call> get key: b d </call>").observation == "<obs> *2 +1"
    assert episode.step("so <call> get key: h </call>").observation == "<obs> error"
    assert episode.step("<call> get key: b").counts == {"calls": 1.0}
    end = episode.step("*2 6 0")
    assert end.done
    assert end.reward == 1.0
    assert episode.verdict().correct
    assert not lookup().verify(lookup().prompts("train", 0, 0, 1)[0], "").correct


def problem_of_repair():
    return {
        "content": "",
        "program": ["*2", "+1"],
        "line": 0,
        "right": "=0",
        "order": ["5", "0", "2", "1", "3", "4", "6"],
    }


def test_a_repair_by_hand():
    task = repair(lines=2, visible=3)
    assert task.question(problem_of_repair(), "<low>") == "<fix> *2 +1 l1: 5 0 <low>"
    episode = task.episode(problem_of_repair(), WORDS)
    assert episode.step("<call> run </call>").observation == "<obs> l1: 2 0"  # 0 stays 0
    assert episode.step("<call> run </call>").observation == "<obs> l1: 5 0"  # and round again
    step = episode.step("<call> edit l1: =3 </call> <call> run </call>")
    assert step.observation == "<obs> ok l1: 0 0"
    assert step.counts == {"calls": 2.0, "valid_calls": 2.0}
    for bad in ("edit", "edit l3: *2", "edit l1: 0", "run l1: +1", "edit l1: *2 l2: *2", "look"):
        assert episode.step(f"<call> {bad} </call>").observation == "<obs> error"
    saved = json.loads(json.dumps(episode.state()))
    assert episode.step("done").done
    assert not episode.verdict().correct
    again = task.episode(problem_of_repair(), WORDS)
    again.restore(saved)
    assert again.step("<call> edit l1: =0 </call> <call> run </call>").observation == "<obs> ok pass"
    assert again.step("").done
    assert again.verdict().correct


def test_hidden_tests_see_more_than_those_that_can_be_run():
    problem = {"content": "", "program": ["=0"], "line": 0, "right": "*2", "order": ["1", *"023456"]}
    episode = repair(lines=1, visible=1).episode(problem, WORDS)
    assert episode.step("<call> edit l1: +1 </call> <call> run </call>").observation == "<obs> ok pass"  # 1 becomes 2
    episode.step("done")
    assert "line 1 is wrong" in episode.verdict().details["reason"]


@pytest.mark.parametrize("task", [lookup(), repair()])
def test_held_out_problems_are_never_trained_on(task):
    held = {prompt.answer["content"] for prompt in task.prompts("eval", 7, 0, 200, "max")}
    seen = {prompt.answer["content"] for prompt in task.prompts("train", 7, 0, 1000, "low")}
    taught = {shown.prompt.answer["content"] for shown in task.demonstrations(7, 0, 500, LEVELS)}
    assert held.isdisjoint(seen | taught)


@pytest.mark.parametrize("task", [lookup(), repair()])
def test_rows_depend_on_their_numbers_alone(task):
    whole = task.prompts("train", 3, 5, 6, "high")
    assert [task.prompts("train", 3, row, 1, "high")[0] for row in range(5, 11)] == whole
    assert task.demonstrations(3, 2, 6, LEVELS)[2:4] == task.demonstrations(3, 4, 2, LEVELS)
    assert task.prompts("train", 4, 5, 6, "high") != whole
    assert json.loads(json.dumps(whole[0].answer)) == whole[0].answer
    low, high = (task.prompts("eval", 3, 0, 1, effort)[0] for effort in ("low", "high"))
    assert low.answer == high.answer
    assert low.text.replace("<low>", "<high>") == high.text


def test_an_effort_without_a_style_is_refused():
    with pytest.raises(ConfigError, match=r"tasks\.fixers\.runs: no entry for effort 'max'"):
        repair(runs={"low": 0, "high": 1})
    with pytest.raises(ConfigError, match=r"tasks\.tool_users\.strides: no entry for effort 'low'"):
        lookup(strides={"high": 2, "max": 1})
