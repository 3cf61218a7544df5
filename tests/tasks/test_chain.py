import itertools
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from opdctl.errors import ConfigError
from opdctl.settings import ChainTask, EffortSettings
from opdctl.tasks import is_held_out, load_task
from opdctl.tasks.chain import DOMAINS, ChainStream
from opdctl.tasks.verifiers import check_references

TOKENS = EffortSettings(by="control_token", levels={"low": "<low>", "high": "<high>", "max": "<max>"})
SYSTEM = EffortSettings(by="system_prompt", levels={"low": "Be brief.", "high": "Think.", "max": "Think hard."})
BRANCHES = ["low", "low", "high", "high", "max"]
CLEAN = {"misread": 0.0, "noise": 0.0, "obey": 1.0}
COUNTS = {"low": 2, "high": 4, "max": 8}


def chain(domain="math", efforts=TOKENS, name="general", **settings):
    return ChainStream(name, ChainTask(task="chain", domain=domain, **settings), efforts)


every_domain = pytest.mark.parametrize("domain", DOMAINS)


def spelled(prompt):
    first, ops = prompt.answer
    return " ".join([first, *ops])


# ------------------------------------------------------------------------------------------------------- prompts


def test_a_prompt_reads_domain_operations_effort_start():
    (prompt,) = chain().prompts("train", 0, 5, 1, "high")
    first, ops = prompt.answer
    assert prompt.text == f"<math> {' '.join(ops)} <high> {first}"
    assert len(ops) == 8
    assert prompt.columns == {"domain": "general", "effort": "high"}
    assert not prompt.messages


def test_without_an_effort_a_prompt_has_neither_token_nor_column():
    (prompt,) = chain().prompts("train", 0, 5, 1)
    first, ops = prompt.answer
    assert prompt.text == f"<math> {' '.join(ops)} {first}"
    assert prompt.columns == {"domain": "general"}


def test_an_effort_by_system_prompt_goes_into_the_messages():
    (prompt,) = chain(efforts=SYSTEM).prompts("train", 0, 5, 1, "max")
    first, ops = prompt.answer
    assert prompt.text == f"<math> {' '.join(ops)} {first}"
    system, user = prompt.messages
    assert system == {"role": "system", "content": "Think hard."}
    assert user == {"role": "user", "content": prompt.text}


def test_all_efforts_ask_the_same_problems():
    low, top = (chain().prompts("eval", 3, 0, 20, effort) for effort in ("low", "max"))
    assert [p.answer for p in low] == [p.answer for p in top]


def test_another_seed_asks_other_problems():
    assert chain().prompts("train", 0, 0, 5) != chain().prompts("train", 1, 0, 5)
    assert chain().prompts("train", -1, 0, 5) != chain().prompts("train", 1, 0, 5)


@every_domain
def test_the_tiny_model_knows_every_word_of_a_chain(domain):
    model = yaml.safe_load((Path(__file__).parents[2] / "conf/model/tiny_qwen3.yaml").read_text())
    task = chain(domain)
    words = {f"<{domain}>", *TOKENS.levels.values(), *DOMAINS[domain].steps, *DOMAINS[domain].states}
    assert words <= set(model["tokenizer"]["words"])
    seen = {word for prompt in task.prompts("train", 0, 0, 300, "low") for word in prompt.text.split()}
    seen |= {
        word for d in task.demonstrations(0, 0, 300, BRANCHES) for word in f"{d.prompt.text} {d.completion}".split()
    }
    assert seen == words


@every_domain
def test_operations_come_as_often_as_they_should(domain):
    ops = [op for prompt in chain(domain, held_out=0.1).prompts("train", 0, 0, 3000) for op in prompt.answer[1]]
    expected = dict(zip(DOMAINS[domain].steps, DOMAINS[domain].frequencies(), strict=True))
    for op, share in expected.items():
        assert ops.count(op) / len(ops) == pytest.approx(share, abs=0.015)


@pytest.mark.parametrize("links", [4, 8, 12, 16])
def test_links_are_the_number_of_operations(links):
    task = chain("code", links=links)
    (prompt,) = task.prompts("train", 0, 0, 1, "low")
    assert len(prompt.answer[1]) == links
    assert len(task.reference(prompt).split()) == links
    assert check_references(task, 20) == []


# --------------------------------------------------------------------------------------------- streams and split


@every_domain
@pytest.mark.parametrize("split", ["train", "eval"])
def test_any_slicing_of_a_stream_gives_the_same_rows(domain, split):
    whole = chain(domain).prompts(split, 7, 0, 600, "low")
    for start, count in [(0, 1), (250, 16), (255, 2), (511, 60), (599, 1)]:
        assert chain(domain).prompts(split, 7, start, count, "low") == whole[start : start + count]


def test_any_slicing_of_the_demonstrations_gives_the_same_rows():
    whole = chain().demonstrations(7, 0, 1500, BRANCHES)
    for start, count in [(0, 3), (1, 80), (1278, 7), (1499, 1)]:
        assert chain().demonstrations(7, start, count, BRANCHES) == whole[start : start + count]


@every_domain
@pytest.mark.parametrize("share", [0.05, 0.1, 0.5])
def test_nothing_evaluated_is_ever_trained_on(domain, share):
    task = chain(domain, links=4, held_out=share)
    held_out = {spelled(prompt) for prompt in task.prompts("eval", 0, 0, 500)}
    trained = {spelled(prompt) for seed in (0, 1) for prompt in task.prompts("train", seed, 0, 2000)}
    shown = {spelled(d.prompt) for d in task.demonstrations(0, 0, 2000, ["low", "max"])}
    assert not held_out & (trained | shown)
    assert all(is_held_out(f"{domain} {problem}", share) for problem in held_out)
    assert not any(is_held_out(f"{domain} {problem}", share) for problem in trained | shown)


def test_the_held_out_share_of_all_problems_is_the_one_asked_for():
    math = DOMAINS["math"]
    problems = [" ".join(["math", *p]) for p in itertools.product(math.states, *[list(math.steps)] * 5)]
    for share in (0.1, 0.3):
        assert np.mean([is_held_out(p, share) for p in problems]) == pytest.approx(share, abs=0.01)


@pytest.mark.parametrize(("share", "split"), [(0.0, "eval"), (1.0, "train"), (0.001, "eval")])
def test_a_split_without_problems_is_refused(share, split):
    with pytest.raises(ConfigError, match=r"tasks.general.held_out: .* hardly a problem"):
        chain(held_out=share).prompts(split, 0, 0, 1)


# ------------------------------------------------------------------------------------------------ demonstrations


def test_rows_of_a_group_share_their_operations_and_ask_each_effort():
    rows = chain().demonstrations(0, 0, 100, BRANCHES)
    for group in [rows[i : i + 5] for i in range(0, 100, 5)]:
        assert len({d.prompt.group for d in group}) == 1
        assert len({d.prompt.answer[1] for d in group}) == 1
        assert [d.prompt.columns["effort"] for d in group] == BRANCHES
    assert len({d.prompt.group for d in rows}) == 20
    assert len({d.prompt.answer[0] for d in rows}) > 1


def test_groups_of_two_tasks_are_never_the_same():
    one, other = (chain(name=name).demonstrations(0, 0, 500, BRANCHES) for name in ("general", "coding_agents"))
    assert not {d.prompt.group for d in one} & {d.prompt.group for d in other}
    assert all(0 <= d.prompt.group < 2**63 for d in one + other)


@every_domain
def test_a_careful_writer_is_always_right_and_obeys(domain):
    task = chain(domain, **CLEAN)
    for row in task.demonstrations(0, 0, 500, BRANCHES):
        assert task.verify(row.prompt, row.completion).correct
        assert len(row.completion.split()) == COUNTS[row.prompt.columns["effort"]]


def test_styles_are_obeyed_as_often_as_asked():
    rows = chain(obey=0.7).demonstrations(0, 0, 6000, ["low", "high", "max"])
    for effort, words in COUNTS.items():
        lengths = [len(d.completion.split()) for d in rows if d.prompt.columns["effort"] == effort]
        for other in COUNTS.values():
            expected = 0.1 + (0.7 if other == words else 0.0)
            assert lengths.count(other) / len(lengths) == pytest.approx(expected, abs=0.03)


@every_domain
def test_a_misread_operation_is_applied_as_another_one_as_often_as_asked(domain):
    task = chain(domain, misread=0.65, noise=0.0, obey=1.0)
    op, applied = task.domain.misread
    after = {o: {s: {task.domain.states[i] for i in task.domain.steps[o](n)} for n, s in enumerate(task.domain.states)}
             for o in task.ops}  # fmt: skip
    wrong, seen = 0, 0
    for row in task.demonstrations(0, 0, 2500, ["max"]):
        before = row.prompt.answer[0]
        for step, word in zip(row.prompt.answer[1], row.completion.split(), strict=True):
            if step == op and after[op][before] != after[applied][before]:
                seen += 1
                wrong += word in after[applied][before]
            elif step != op:
                assert word in after[step][before]
            before = word
    assert wrong / seen == pytest.approx(0.65, abs=0.03)


def test_slips_are_as_frequent_as_asked():
    task = chain(misread=0.0, noise=0.2, obey=1.0)
    rows = task.demonstrations(0, 0, 2000, ["max"])
    slips = 0
    for row in rows:
        states = [row.prompt.answer[0], *row.completion.split()]
        slips += sum(
            task.domain.steps[op](int(before)) != (int(after),)
            for op, before, after in zip(row.prompt.answer[1], states, states[1:], strict=False)
        )
    assert slips / (8 * len(rows)) == pytest.approx(0.2 * 6 / 7, abs=0.01)  # one slip in seven hits the right state


def test_without_efforts_every_row_is_its_own_group_in_the_last_style():
    rows = chain(efforts=None, **CLEAN).demonstrations(0, 0, 50)
    assert len({d.prompt.group for d in rows}) == 50
    assert {len(d.completion.split()) for d in rows} == {8}
    assert all(d.prompt.columns == {"domain": "general"} for d in rows)


# ------------------------------------------------------------------------------------------------------ verifier


@every_domain
def test_references_verify(domain):
    assert check_references(chain(domain), 300) == []


@pytest.mark.parametrize(
    ("domain", "prompt", "right", "wrong"),
    [
        (
            "math",
            ("3", ("+1", "*2", "=0", "-1", "+1", "+1", "*2", "-1")),
            ["4 1 0 6 0 1 2 1", "1 6 1 1", "6 1", "0 1", "5 5 5 1"],
            ["4 1 0 6 0 1 2 2", "6 2", "1", "1 6 1", "4 1 0 6 0 1 2 1 1", "", "x 1 1", "6 1."],
        ),
        (
            "code",
            ("01", ("swap", "x+1", "y+1", "x=y", "x=0", "ret", "y+1", "swap")),
            ["10 20 21 11 01 21 22 22", "20 11 21 22", "11 22"],
            ["11 21", "22", "22 22 22", "1 1 2 2 2"],
        ),
        (
            "if",
            ("g", ("nx", "nb", "mir", "vw", "pv", "fx", "nb", "vw")),
            ["a b f e d d c a", "a g a e d d e e", "b e d a", "g a d e", "e a", "a e"],
            ["a b f e d d c b", "a d f e d d c a", "b e d d", "e", "a", "b e d", "e z", "c a"],
        ),
    ],
)
def test_verdicts(domain, prompt, right, wrong):
    task = chain(domain)
    asked = task.prompts("train", 0, 0, 1, "max")[0]
    asked = type(asked)(asked.text, prompt, asked.columns)
    for completion in right:
        assert task.verify(asked, completion).correct, completion
    for completion in wrong:
        verdict = task.verify(asked, completion)
        assert (verdict.correct, verdict.reward) == (False, 0.0), completion
        assert verdict.details["reason"]


@every_domain
def test_a_wrong_last_state_is_wrong_at_every_effort(domain):
    task = chain(domain, **CLEAN)
    for row in task.demonstrations(0, 0, 300, BRANCHES):
        *head, _ = row.completion.split()
        right = {s for s in task.domain.states if task.verify(row.prompt, " ".join([*head, s])).correct}
        assert right < set(task.domain.states)


ASKED = {domain: (task := chain(domain), task.prompts("train", 0, 0, 1)[0]) for domain in DOMAINS}


@given(
    st.sampled_from(list(DOMAINS)),
    st.one_of(
        st.text(max_size=40),
        st.lists(st.sampled_from(["a", "d", "0", "3", "21", "<eos>", "<pad>", "ret", "é", ""]), max_size=9).map(
            " ".join
        ),
    ),
)
def test_any_text_gets_a_verdict(domain, completion):
    task, prompt = ASKED[domain]
    verdict = task.verify(prompt, completion)
    assert verdict.reward == float(verdict.correct)
    assert not verdict.correct or len(completion.split()) in COUNTS.values()


# ------------------------------------------------------------------------------------------------------ settings


def test_a_stride_must_divide_the_links_and_every_level_needs_one():
    with pytest.raises(ConfigError) as caught:
        chain(links=8, strides={"low": 3, "max": 1})
    assert caught.value.problems == [
        "tasks.general.strides.low: 3 does not divide links = 8",
        "tasks.general.strides: no stride for effort 'high'",
    ]


@pytest.mark.parametrize(("efforts", "known"), [(TOKENS, "low, high, max"), (None, "none: ")])
def test_an_unknown_effort_is_refused_with_the_known_ones(efforts, known):
    task = chain(efforts=efforts)
    with pytest.raises(ConfigError, match=f"'medium' is asked for; known levels: {known}"):
        task.prompts("train", 0, 0, 1, "medium")
    with pytest.raises(ConfigError, match=f"'medium' is asked for; known levels: {known}"):
        task.demonstrations(0, 0, 1, ["medium"])


def test_load_task_makes_a_chain():
    task = load_task("general", ChainTask(task="chain", domain="if"), TOKENS)
    assert isinstance(task, ChainStream)
    assert task.size("train") is None
