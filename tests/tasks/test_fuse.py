from pathlib import Path

import pytest
import yaml

from opdctl.settings import ChainTask, EffortSettings, FuseTask
from opdctl.tasks import Prompt, load_task
from opdctl.tasks.chain import DOMAINS
from opdctl.tasks.verifiers import check_references

TOKENS = EffortSettings(by="control_token", levels={"low": "<low>", "high": "<high>", "max": "<max>"})
ROOT = Path(__file__).parents[2]
PACKAGED = yaml.safe_load((ROOT / "conf/task/fusing.yaml").read_text())["tasks"]


def fuse(domain="math", candidates=4, **settings):
    chain = ChainTask(task="chain", domain=domain, **settings)
    return load_task("fused", FuseTask(task="fuse", chain=chain, candidates=candidates), TOKENS)


def test_a_prompt_is_the_problem_and_its_candidates():
    (prompt,) = fuse(candidates=3).prompts("train", 0, 7, 1, "high")
    first, ops = prompt.answer
    problem, *candidates = prompt.text.split(" : ")
    assert problem == f"<fuse> <math> {' '.join(ops)} <high> {first}"
    assert len(candidates) == 3
    assert all(len(candidate.split()) == 4 for candidate in candidates)
    assert fuse(candidates=3).shown(prompt) == candidates


@pytest.mark.parametrize("domain", DOMAINS)
def test_an_answer_is_judged_as_the_chains(domain):
    chain = load_task("fused", ChainTask(task="chain", domain=domain), TOKENS)
    task = fuse(domain)
    for prompt in task.prompts("eval", 0, 0, 100, "max"):
        for candidate in task.shown(prompt):
            assert task.verify(prompt, candidate) == chain.verify(Prompt("", prompt.answer, {}), candidate)
    assert check_references(task, 100) == []


def test_a_demonstration_is_no_better_than_a_candidate():
    task = fuse()
    shown = task.demonstrations(0, 0, 2000, ["max"])
    written = sum(task.verify(row.prompt, row.completion).correct for row in shown) / len(shown)
    candidates = sum(task.verify(row.prompt, c).correct for row in shown for c in task.shown(row.prompt))
    assert written == pytest.approx(candidates / (4 * len(shown)), abs=0.04)


@pytest.mark.parametrize("name", PACKAGED)
def test_the_packaged_candidates_leave_much_to_gain(name):
    """Some candidate is right far more often than any one of them."""
    task = load_task(name, FuseTask.model_validate(PACKAGED[name]), TOKENS)
    right = [[task.verify(p, c).correct for c in task.shown(p)] for p in task.prompts("eval", 0, 0, 500, "max")]
    best = max(sum(row[at] for row in right) for at in range(4)) / len(right)
    assert sum(map(any, right)) / len(right) > best + 0.2


def test_rows_depend_on_their_number_alone():
    efforts = ["low", "max", "max"]
    whole = fuse().demonstrations(3, 0, 700, efforts)
    assert [*fuse().demonstrations(3, 0, 301, efforts), *fuse().demonstrations(3, 301, 399, efforts)] == whole
    assert len({row.prompt.text for row in whole}) > 690


@pytest.mark.parametrize("domain", DOMAINS)
def test_the_packaged_model_knows_every_word(domain):
    model = yaml.safe_load((ROOT / "conf/model/tiny_qwen3_tasks.yaml").read_text())
    shown = fuse(domain).demonstrations(0, 0, 300, ["low", "high", "max"])
    words = {word for row in shown for word in f"{row.prompt.text} {row.completion}".split()}
    assert words <= set(model["tokenizer"]["words"])
