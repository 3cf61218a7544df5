from pathlib import Path

import pytest
import yaml

from opdctl.errors import ConfigError
from opdctl.settings import EffortSettings, FactsTask
from opdctl.tasks import load_task


def facts(count=300, efforts=None, **settings):
    return load_task("facts", FactsTask(task="facts", facts=count, **settings), efforts)


def told(task, split="train", seed=0, start=0, count=300):
    return {prompt.text: prompt.answer for prompt in task.prompts(split, seed, start, count)}


def test_every_key_has_one_value_which_evaluation_asks_for_too():
    task = facts()
    known = told(task)
    assert len(known) == 300 == task.size("train") == task.size("eval")
    assert told(task, "eval", seed=99) == known


def test_facts_belong_to_their_own_seed_and_not_to_the_recipes():
    assert told(facts(), seed=5) == told(facts(), seed=6)
    assert told(facts(seed=1)) != told(facts())


def test_each_epoch_reads_all_facts_in_an_order_of_its_own():
    task = facts(50)
    epochs = [[p.text for p in task.prompts("train", 0, start, 50)] for start in (0, 50)]
    assert sorted(epochs[0]) == sorted(epochs[1])
    assert epochs[0] != epochs[1]
    assert [p.text for p in task.prompts("train", 0, 30, 40)] == [*epochs[0][30:], *epochs[1][:20]]


def test_only_the_value_is_right():
    task = facts()
    (row,) = task.demonstrations(0, 0, 1)
    assert task.verify(row.prompt, row.completion).correct
    assert not task.verify(row.prompt, row.completion.split()[0]).correct
    assert not task.verify(row.prompt, "v0 v0 v0").correct
    assert task.reference(row.prompt) == row.completion


def test_no_key_tells_its_value():
    """As many facts share a first word of the value as chance lets, whatever the last word of the key."""
    known = told(facts(1000), count=1000)
    same = [value.split()[0][1:] == key.split()[-1][1:] for key, value in known.items()]
    assert 0.05 < sum(same) / len(same) < 0.15
    assert len(known) == 1000


def test_an_effort_stands_behind_the_key_and_changes_nothing_else():
    tokens = EffortSettings(by="control_token", levels={"low": "<low>", "max": "<max>"})
    system = EffortSettings(by="system_prompt", levels={"low": "Be brief.", "max": "Think."})
    (plain,) = facts().prompts("eval", 0, 5, 1)
    (by_token,) = facts(efforts=tokens).prompts("eval", 0, 5, 1, "max")
    (by_system,) = facts(efforts=system).prompts("eval", 0, 5, 1, "max")
    assert (by_token.text, by_token.answer) == (f"{plain.text} <max>", plain.answer)
    assert by_token.columns == {"domain": "facts", "effort": "max"}
    assert [message["content"] for message in by_system.messages] == ["Think.", plain.text]
    with pytest.raises(ConfigError, match="tasks.facts: effort 'high' is asked for"):
        facts(efforts=tokens).prompts("train", 0, 0, 1, "high")


def test_every_effort_reads_all_facts():
    efforts = EffortSettings(by="control_token", levels={"low": "<low>", "max": "<max>"})
    shown = facts(20, efforts=efforts).demonstrations(0, 0, 40, ["low", "max"])
    assert [row.prompt.columns["effort"] for row in shown] == ["low", "max"] * 20
    assert len({row.prompt.text for row in shown}) == 40


def test_the_packaged_model_knows_every_word():
    model = yaml.safe_load((Path(__file__).parents[2] / "conf/model/tiny_qwen3_tasks.yaml").read_text())
    words = {word for key, value in told(facts(1000), count=1000).items() for word in f"{key} {value}".split()}
    assert words <= set(model["tokenizer"]["words"])
