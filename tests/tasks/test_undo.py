from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from opdctl.backends.verl.judge import pack, unpack
from opdctl.errors import ConfigError
from opdctl.settings import EffortSettings, UndoTask
from opdctl.tasks import Prompt, is_held_out, load_task
from opdctl.tasks.chain import DOMAINS
from opdctl.tasks.undo import Problem, UndoStream
from opdctl.tasks.verifiers import check_references

TOKENS = EffortSettings(by="control_token", levels={"low": "<low>", "max": "<max>"})
SYSTEM = EffortSettings(by="system_prompt", levels={"low": "Be brief.", "max": "Think hard."})
CLEAN = {"slip": 0.0}


def undo(domain="math", name="chains", **settings):
    return UndoStream(name, UndoTask(task="undo", domain=domain, **settings), None)


every_domain = pytest.mark.parametrize("domain", DOMAINS)


def spelled(domain, prompt):
    return " ".join([domain, prompt.answer.first, *prompt.answer.ops])


# ------------------------------------------------------------------------------------------------------- prompts


def test_a_prompt_reads_domain_operations_dots_start():
    for prompt in undo(links=[4, 6]).prompts("train", 0, 5, 20):
        problem = prompt.answer
        assert prompt.text == " ".join(["<math>", *problem.ops, *["."] * (6 - len(problem.ops)), problem.first])
        assert prompt.columns == {"domain": "chains"}


def test_an_effort_is_asked_for_before_the_start_or_in_the_system_prompt():
    settings = UndoTask(task="undo", domain="math", links=[4])
    (prompt,) = UndoStream("chains", settings, TOKENS).prompts("train", 0, 5, 1, "low")
    first, ops, _ = prompt.answer
    assert prompt.text == f"<math> {' '.join(ops)} <low> {first}"
    assert prompt.columns == {"domain": "chains", "effort": "low"}
    (prompt,) = UndoStream("chains", settings, SYSTEM).prompts("train", 0, 5, 1, "low")
    assert prompt.text == f"<math> {' '.join(ops)} {first}"
    assert prompt.messages == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": prompt.text}]
    rows = UndoStream("chains", settings, TOKENS).demonstrations(0, 3, 4, ["low", "max"])
    assert [row.prompt.columns["effort"] for row in rows] == ["max", "low", "max", "low"]


def test_lengths_are_mixed_evenly():
    lengths = Counter(len(prompt.answer.ops) for prompt in undo(links=[6, 9, 12]).prompts("train", 0, 0, 3000))
    assert lengths.keys() == {6, 9, 12}
    assert all(count == pytest.approx(1000, abs=100) for count in lengths.values())


@every_domain
def test_the_models_of_the_task_know_its_words(domain):
    model = yaml.safe_load((Path(__file__).parents[2] / "conf/model/tiny_qwen3_undo.yaml").read_text())
    rows = undo(domain, slip=0.3).demonstrations(0, 0, 300)
    seen = {word for row in rows for word in f"{row.prompt.text} {row.completion}".split()}
    assert seen == {f"<{domain}>", *DOMAINS[domain].steps, *DOMAINS[domain].states, "<undo>", "."}
    assert seen <= set(model["tokenizer"]["words"])


@every_domain
@pytest.mark.parametrize("planted", [False, True])
@pytest.mark.parametrize("split", ["train", "eval"])
def test_any_slicing_of_a_stream_gives_the_same_rows(domain, planted, split):
    whole = undo(domain, planted=planted).prompts(split, 7, 0, 600)
    for start, count in [(0, 1), (250, 16), (255, 2), (511, 60), (599, 1)]:
        assert undo(domain, planted=planted).prompts(split, 7, start, count) == whole[start : start + count]


def test_any_slicing_of_the_demonstrations_gives_the_same_rows():
    whole = undo().demonstrations(7, 0, 600)
    for start, count in [(0, 3), (1, 80), (250, 16), (599, 1)]:
        assert undo().demonstrations(7, start, count) == whole[start : start + count]


def test_another_seed_asks_other_problems():
    assert undo().prompts("train", 0, 0, 5) != undo().prompts("train", 1, 0, 5)
    assert undo().prompts("train", -1, 0, 5) != undo().prompts("train", 1, 0, 5)


@every_domain
def test_held_out_problems_are_in_no_training_row(domain):
    task = undo(domain, links=[4, 5])
    for row in task.demonstrations(0, 0, 500):
        assert not is_held_out(spelled(domain, row.prompt), 0.1)
    for prompt in task.prompts("train", 3, 0, 500):
        assert not is_held_out(spelled(domain, prompt), 0.1)
    for prompt in task.prompts("eval", 99, 0, 300):
        assert is_held_out(spelled(domain, prompt), 0.1)


def test_planted_prompts_ask_the_same_problems_with_a_beginning_that_is_wrong_at_its_last_state():
    plain, planted = (undo(planted=flag, held_out=0.2).prompts("eval", 4, 0, 300) for flag in (False, True))
    assert [p.answer.first + " ".join(p.answer.ops) for p in plain] == [
        p.answer.first + " ".join(p.answer.ops) for p in planted
    ]
    for asked, bare in zip(planted, plain, strict=True):
        first, ops, written = asked.answer
        assert asked.text == f"{bare.text} {' '.join(written)}"
        states = [int(first), *map(int, written)]
        right = [
            DOMAINS["math"].steps[op](before) == (after,)
            for op, (before, after) in zip(ops, pairwise(states), strict=False)
        ]
        assert right == [True] * (len(written) - 1) + [False]
    assert {len(p.answer.planted) for p in planted} == set(range(1, 17))


# ------------------------------------------------------------------------------------------------ demonstrations


@every_domain
def test_a_careful_writer_is_always_right_and_never_undoes(domain):
    task = undo(domain, **CLEAN)
    for row in task.demonstrations(0, 0, 300):
        assert task.verify(row.prompt, row.completion).details == {"reason": "", "undone": 0}
        assert len(row.completion.split()) == len(row.prompt.answer.ops)


@every_domain
def test_a_writer_who_notices_every_slip_is_always_right(domain):
    task = undo(domain, slip=0.2, notice=1.0, undos=64)
    verdicts = [task.verify(row.prompt, row.completion) for row in task.demonstrations(0, 0, 300)]
    assert all(verdict.correct for verdict in verdicts)
    links = sum(len(row.prompt.answer.ops) for row in task.demonstrations(0, 0, 300))
    # a link is written until it is right: 1 / (1 - slip) times
    assert sum(verdict.details["undone"] for verdict in verdicts) / links == pytest.approx(0.25, abs=0.04)


def test_slips_and_their_undoing_are_as_frequent_as_asked():
    slips, undone, written = 0, 0, 0
    task = undo(slip=0.2, notice=0.6, undos=64)
    for row in task.demonstrations(0, 0, 1000):
        stood, words = [row.prompt.answer.first], row.completion.split()
        for word, then in zip(words, [*words[1:], ""], strict=True):
            if word == "<undo>":
                stood.pop()
                continue
            written += 1
            op = row.prompt.answer.ops[len(stood) - 1]
            if DOMAINS["math"].steps[op](int(stood[-1])) != (int(word),):
                slips += 1
                undone += then == "<undo>"
            else:
                assert then != "<undo>"
            stood.append(word)
    assert slips / written == pytest.approx(0.2, abs=0.01)
    assert undone / slips == pytest.approx(0.6, abs=0.03)


def test_a_writer_never_undoes_more_than_the_verifier_allows():
    task = undo(slip=0.5, notice=1.0, undos=2)
    undone = [row.completion.split().count("<undo>") for row in task.demonstrations(0, 0, 200)]
    assert max(undone) == 2


# ------------------------------------------------------------------------------------------------------ verifier


def asked(first, ops, planted=()):
    return Prompt("", Problem(first, ops, planted), {"domain": "chains"})


OPS = ("+1", "*2", "-1")  # from 3: 4, 1, 0


@pytest.mark.parametrize(
    "completion",
    [
        "4 1 0",
        "4 5 <undo> 1 0",
        "5 <undo> 4 1 0",
        "4 1 6 <undo> 0",
        "4 5 4 <undo> <undo> 1 0",  # noticed late
        "4 1 <undo> 1 0",  # taken back although right
        "2 <undo> 3 <undo> 4 1 0",
        "4 1 0 0 <undo>",  # one too many, taken back
    ],
)
def test_right_answers(completion):
    assert undo(undos=2).verify(asked("3", OPS), completion).correct


@pytest.mark.parametrize(
    ("completion", "reason"),
    [
        ("4 5 4", "state 2, '5', does not follow '4'"),  # the rest follows from the error
        ("4 5 0", "state 2, '5', does not follow '4'"),  # the end is right by luck
        ("4 5 <undo> 2 1", "state 2, '2', does not follow '4'"),
        ("4 1", "2 states stand, not 3"),
        ("4 1 0 0", "4 states stand, not 3"),
        ("4 1 0 <undo>", "2 states stand, not 3"),
        ("", "0 states stand, not 3"),
        ("<undo> 4 1 0", "nothing is left to undo"),
        ("4 <undo> <undo> 4 1 0", "nothing is left to undo"),
        ("1 <undo> 2 <undo> 5 <undo> 4 1 0", "3 undos, not 2 at most"),
        ("4 x 0", "state 2, 'x', does not follow '4'"),
        ("4 1 x <undo> 0.", "state 3, '0.', does not follow '1'"),
    ],
)
def test_wrong_answers(completion, reason):
    verdict = undo(undos=2).verify(asked("3", OPS), completion)
    assert (verdict.correct, verdict.reward, verdict.details["reason"]) == (False, 0.0, reason)


def test_each_state_that_the_operation_allows_is_right():
    task, prompt = undo("if"), asked("a", ("nb", "fx"))
    assert [s for s in "abcdefg" if task.verify(prompt, f"{s} d").correct] == ["b", "g"]


def test_a_planted_beginning_is_part_of_the_answer():
    task, prompt = undo(), asked("3", OPS, ("4", "5"))
    assert task.verify(prompt, "<undo> 1 0").details == {"reason": "", "undone": 1}
    for wrong in ("1 0", "4", "0", "4 1 0", "<undo> 4 1 0"):
        assert not task.verify(prompt, wrong).correct


@every_domain
@pytest.mark.parametrize("planted", [False, True])
def test_references_verify(domain, planted):
    assert check_references(undo(domain, planted=planted), 300) == []


CASES = st.tuples(st.sampled_from(list(DOMAINS)), st.booleans(), st.integers(0, 500))


@given(CASES, st.data())
def test_a_corrupted_reference_is_wrong_and_undoing_the_corruption_right(case, data):
    domain, planted, row = case
    task = undo(domain, planted=planted)
    (prompt,) = task.prompts("train", 0, row, 1)
    words = task.reference(prompt).split()
    at = data.draw(st.sampled_from([i for i, word in enumerate(words) if word != "<undo>"]))
    corrupt = data.draw(st.sampled_from([*task.domain.states, "", "."]))
    head, tail = words[:at], words[at + 1 :]
    right = task.verify(prompt, " ".join([*head, corrupt, *tail])).correct
    if corrupt not in task.domain.states:
        assert not right
    elif domain != "if":  # where another state may be right as well
        assert right == (corrupt == words[at])
    assert task.verify(prompt, " ".join([*head, corrupt or "x", "<undo>", *words[at:]])).correct


@given(
    st.text(max_size=40) | st.lists(st.sampled_from(["<undo>", "0", "3", ".", "<eos>", ""]), max_size=20).map(" ".join)
)
def test_any_text_gets_a_verdict(completion):
    verdict = undo().verify(asked("3", OPS), completion)
    assert verdict.reward == float(verdict.correct)


def test_a_problem_survives_the_way_to_a_verifier_elsewhere():
    task = undo(planted=True)
    (prompt,) = task.prompts("eval", 0, 0, 1)
    assert task.verify(unpack(pack(prompt), task.settings), task.reference(prompt)).correct


# ------------------------------------------------------------------------------------------------------ settings


def test_load_task_makes_one():
    assert isinstance(load_task("chains", UndoTask(task="undo", domain="if"), None), UndoStream)


def test_an_unknown_effort_is_refused():
    for efforts in (None, TOKENS):
        task = UndoStream("chains", UndoTask(task="undo", domain="math"), efforts)
        with pytest.raises(ConfigError, match="tasks.chains: effort 'medium' is asked for"):
            task.prompts("train", 0, 0, 1, "medium")
        with pytest.raises(ConfigError, match="tasks.chains: effort 'medium' is asked for"):
            task.demonstrations(0, 0, 1, ["medium"])


@pytest.mark.parametrize(("held_out", "split"), [(0.0, "eval"), (1.0, "train")])
def test_a_split_without_problems_is_refused(held_out, split):
    with pytest.raises(ConfigError, match=rf"tasks.chains.held_out: {held_out} leaves hardly a problem for {split}"):
        undo(held_out=held_out).prompts(split, 0, 0, 1)
