from pathlib import Path

import pytest
import yaml

from opdctl.errors import ConfigError
from opdctl.settings import ChainTask, EffortSettings, GradeTask
from opdctl.tasks import Prompt, is_held_out, load_task
from opdctl.tasks.chain import DOMAINS
from opdctl.tasks.verifiers import check_references

TOKENS = EffortSettings(by="control_token", levels={"low": "<low>", "high": "<high>", "max": "<max>"})
SYSTEM = EffortSettings(by="system_prompt", levels={"low": "Be brief.", "high": "Think.", "max": "Think hard."})
ROWS = 1000


def grade(domain="math", efforts=TOKENS, steps=True, **settings):
    chain = ChainTask(task="chain", domain=domain, **settings)
    return load_task("graded", GradeTask(task="grade", chain=chain, steps=steps), efforts)


def chain(domain="math"):
    return load_task("graded", ChainTask(task="chain", domain=domain), TOKENS)


def taken_apart(prompt):
    """The problem as the chain asks it, and the answer that is shown."""
    problem, _, answer = prompt.text.partition(" : ")
    mark, _, problem = problem.partition(" ")
    assert mark == "<grade>"
    _, *ops, _, first = problem.split()
    return Prompt(problem, (first, ops), {}), answer


every_domain = pytest.mark.parametrize("domain", DOMAINS)


@every_domain
@pytest.mark.parametrize("effort", ["low", "max"])
def test_the_verdict_is_the_chains_own_on_the_shown_answer(domain, effort):
    task, judged = grade(domain), chain(domain)
    for prompt in task.prompts("train", 0, 0, 200, effort):
        problem, answer = taken_apart(prompt)
        right = judged.verify(problem, answer).correct
        assert task.verify(prompt, "yes").correct == right
        assert task.verify(prompt, "no").correct != right
        assert not task.verify(prompt, "").correct


@every_domain
def test_half_of_the_answers_are_right(domain):
    task = grade(domain)
    right = sum(task.verify(prompt, "yes").correct for prompt in task.prompts("train", 0, 0, ROWS, "max"))
    assert 0.45 < right / ROWS < 0.55


def test_the_problem_alone_does_not_give_the_verdict_away():
    """As many right answers among problems with the operation that is misread as among all."""
    task = grade()
    hard = [prompt for prompt in task.prompts("train", 0, 0, 3 * ROWS, "max") if "*2" in prompt.text]
    assert 0.45 < sum(task.verify(prompt, "yes").correct for prompt in hard) / len(hard) < 0.55


def test_no_problem_of_training_is_asked_in_evaluation():
    for split, held in (("train", False), ("eval", True)):
        for prompt in grade(held_out=0.3).prompts(split, 0, 0, 200, "max"):
            first, ops = taken_apart(prompt)[0].answer
            assert is_held_out(" ".join(["math", first, *ops]), 0.3) == held


@every_domain
@pytest.mark.parametrize("effort", ["max", "high"])
def test_a_demonstration_writes_a_right_answer_and_then_the_verdict(domain, effort):
    task, judged = grade(domain), chain(domain)
    for shown in task.demonstrations(0, 0, 100, [effort]):
        problem, answer = taken_apart(shown.prompt)
        *right, last, verdict = shown.completion.split()
        assert last == answer.split()[-1]
        assert judged.verify(problem, " ".join(right)).correct
        assert len(right) == len(answer.split())
        alike = right == answer.split() if domain == "if" else right[-1] == answer.split()[-1]
        assert verdict == ("yes" if alike else "no")
        assert task.verify(shown.prompt, shown.completion).correct


@pytest.mark.parametrize(
    ("domain", "problem", "written", "right"),
    [
        ("math", "3 +1 *2 =0 +1 +1 +1 +1 +1", "4 5 0 1 2 3 4 5", "4 1 0 1 2 3 4 5"),
        ("math", "3 +1 *2 =0 +1 +1 +1 +1 +1", "1 6", "1 5"),
        ("if", "a nx nb nx fx pv pv vw nx", "b c d d c b e f", "b c d d c b e f"),
        ("if", "a nx nb nx fx pv pv vw nx", "b e f d c b e f", "b a b d c b e f"),
    ],
)
def test_the_nearest_right_answer_by_hand(domain, problem, written, right):
    first, *ops = problem.split()
    assert chain(domain).nearest(Prompt("", (first, ops), {}), written.split()) == right.split()


def test_without_steps_the_verdict_is_all_that_is_written():
    shown = grade(steps=False).demonstrations(0, 0, 50, ["max"])
    assert {demonstration.completion for demonstration in shown} == {"yes", "no"}


def test_rows_depend_on_their_number_alone():
    efforts = ["low", "max", "max"]
    whole = grade().demonstrations(3, 0, 700, efforts)
    assert [*grade().demonstrations(3, 0, 301, efforts), *grade().demonstrations(3, 301, 399, efforts)] == whole
    assert len({shown.prompt.text for shown in whole}) > 690
    assert [shown.prompt.columns["effort"] for shown in whole[:6]] == efforts * 2


def test_references_are_right():
    assert check_references(grade(), 100) == []


def test_an_effort_by_system_prompt_stays_in_the_messages():
    (prompt,) = grade(efforts=SYSTEM).prompts("train", 0, 0, 1, "max")
    system, user = prompt.messages
    assert system["content"] == "Think hard."
    assert user == {"role": "user", "content": prompt.text}
    assert prompt.text.startswith("<grade> <math>")


def test_a_writer_who_is_never_wrong_is_refused():
    with pytest.raises(ConfigError, match="tasks.graded.chain: its writer is hardly ever wrong"):
        grade(misread=0.0, noise=0.0).prompts("train", 0, 0, 1, "max")


@every_domain
def test_the_packaged_model_knows_every_word(domain):
    model = yaml.safe_load((Path(__file__).parents[2] / "conf/model/tiny_qwen3_tasks.yaml").read_text())
    shown = grade(domain).demonstrations(0, 0, 300, ["low", "high", "max"])
    words = {word for row in shown for word in f"{row.prompt.text} {row.completion}".split()}
    assert words <= set(model["tokenizer"]["words"])
