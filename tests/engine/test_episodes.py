"""Rollouts of several turns."""

import time
from functools import partial

import pytest
import torch
from engine.counting import Counting
from engine.models import tiny_policy
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from opdctl.engine.episodes import episode_metrics
from opdctl.engine.policy import completion_logprobs
from opdctl.engine.rows import Mixer, Renderer, judge, roll
from opdctl.engine.sampling import Completions, sample
from opdctl.errors import StageFailed, StageRefused
from opdctl.settings import Mixture, Rollout, Turns
from opdctl.tasks import Prompt, Verdict
from opdctl.tasks.environment import Step

torch.set_num_threads(1)
TURNS = Turns(max_turns=4, max_turn_tokens=5, max_observation_tokens=8)
OPTIONS = Rollout(prompts=3, max_prompt_tokens=4, max_completion_tokens=40, turns=TURNS, temperature=0.7)


class Answering(Counting):
    """The same prompts answered in one turn."""

    environment = None

    def verify(self, prompt, completion):
        return Verdict(True, 0.25)


@pytest.fixture(scope="module")
def model():
    policy, tokenizer = tiny_policy()
    policy.eos_ids = (2, *range(15, 29))  # ends its turns before they are cut, most of the time
    return policy, Renderer(tokenizer, policy.eos_ids)


def rows_of(tasks, count=3):
    mixer = Mixer(tasks, Mixture(tasks=list(tasks)), "train", 0)
    return mixer.rows(0, count)


def played(model, rows, options=OPTIONS, group_size=2):
    policy, renderer = model
    return roll(partial(sample, policy), renderer, rows, options, seed=3, group_size=group_size)


def sequences(prompts, rollout, group_size=2):
    return [rollout.sequence(i, prompts[i // group_size], 0) for i in range(len(rollout.completions))]


def test_log_probabilities_are_those_of_the_whole_sequence_at_the_turns_alone(model):
    prompts, rollout = played(model, rows_of({"a": Counting()}))
    own = sequences(prompts, rollout)
    assert any(len(one.completion) > one.counted for one in own)
    again = completion_logprobs(model[0], own, micro_batch_tokens=4096, temperature=0.7)
    torch.testing.assert_close(torch.cat(again), rollout.sampling_logprobs_N, atol=1e-5, rtol=1e-4)
    assert len(rollout.entropy_N) == sum(rollout.counted)


def test_masked_tokens_are_what_the_environment_said(model):
    prompts, rollout = played(model, rows_of({"a": Counting()}))
    told = {tuple(model[1].observation(f"w9 w9 w{10 + n}", 8)) for n in range(3)}
    seen = set()
    for one in sequences(prompts, rollout):
        heard = [token for token, own in zip(one.completion, one.learned, strict=True) if not own]
        seen |= {tuple(heard[at : at + 3]) for at in range(0, len(heard), 3)}
        assert one.learned[0]
        assert one.learned[-1]
    assert seen
    assert seen <= told


def test_an_episode_is_the_same_in_any_company(model):
    rows = rows_of({"a": Counting()})
    _, whole = played(model, rows)
    _, alone = played(model, rows[2:])
    assert alone.completions == whole.completions[4:]
    _, more = played(model, rows, group_size=3)
    assert more.completions[:2] == whole.completions[:2]
    assert len(set(map(tuple, more.completions))) > 6


def test_tasks_of_one_turn_and_of_many_share_a_batch(model):
    tasks = {"a": Counting(), "b": Answering()}
    rows = rows_of(tasks, 4)
    prompts, mixed = played(model, rows)
    _, episodes = played(model, [row for row in rows if row.task == "a"])
    _, answers = played(model, [row for row in rows if row.task == "b"])
    assert [row.task for row in rows] == ["a", "a", "b", "b"]
    assert mixed.completions == episodes.completions + answers.completions
    assert mixed.learned[4:] == mixed.episodes[4:] == [None] * 4
    assert torch.equal(
        mixed.sampling_logprobs_N, torch.cat([episodes.sampling_logprobs_N, answers.sampling_logprobs_N])
    )
    verdicts = judge(tasks, rows, model[1].texts(mixed.completions), 2, mixed.episodes)
    assert [verdict.reward for verdict in verdicts[4:]] == [0.25] * 4
    assert [verdict.reward for verdict in verdicts[:4]] == [one.verdict.reward for one in mixed.episodes[:4]]
    assert sequences(prompts, mixed)[0].learned == mixed.learned[0]


@pytest.mark.parametrize(
    "options",
    [
        OPTIONS.model_copy(update={"turns": TURNS.model_copy(update={"max_turns": 2})}),
        OPTIONS.model_copy(update={"max_completion_tokens": 12}),
    ],
    ids=["turns", "tokens"],
)
def test_an_episode_that_no_limit_lets_end_is_not_finished(model, options):
    prompts, rollout = played(model, rows_of({"a": Counting()}), options)
    assert not any(rollout.finished)
    assert all(len(ids) <= options.max_completion_tokens for ids in rollout.completions)
    assert all(one.learned[-1] for one in sequences(prompts, rollout))


def test_a_turn_that_is_cut_ends_the_episode_unseen(model):
    task = Counting()
    options = OPTIONS.model_copy(update={"turns": TURNS.model_copy(update={"max_turn_tokens": 2})})
    _, rollout = played(model, rows_of({"a": task}, 12), options)
    cut = [ids for ids in rollout.completions if ids[-1] not in model[0].eos_ids]
    assert 0 < len(cut) < 24
    assert len(task.actions) == sum(one.counts["turns"] for one in rollout.episodes) - len(cut)


def test_every_environment_is_closed_whatever_happens(model):
    task = Counting()
    played(model, rows_of({"a": task}))
    assert task.actions
    assert task.open == 0
    with pytest.raises(StageRefused, match=r"config\.rollout\.turns is not set"):
        played(model, rows_of({"a": task}), OPTIONS.model_copy(update={"turns": None}))
    task.told = "unknown"
    with pytest.raises(Exception, match="vocabulary"):
        played(model, rows_of({"a": task}))
    assert task.open == 0


def test_metrics_of_episodes(model):
    _, rollout = played(model, rows_of({"a": Counting()}))
    metrics = episode_metrics(rollout.episodes)
    counts = [one.counts for one in rollout.episodes]
    assert metrics["turns"] == sum(own["turns"] for own in counts) / 6
    steps = sum(own.get("calls", 0) for own in counts)
    assert metrics["valid_calls"] == sum(own.get("valid_calls", 0) for own in counts) / steps
    heard = sum(map(len, rollout.completions)) - sum(rollout.counted)
    assert metrics["observation_tokens"] == heard / 6
    assert episode_metrics([None, None]) == {}


def test_demonstrations_teach_the_turns_and_not_the_observations(model):
    renderer = model[1]
    [(ids, learned)] = renderer.demonstrations(Counting(turns=2).demonstrations(0, 0, 1), 8)
    assert renderer.texts([ids]) == ["w6 w5 <eos> w9 w9 w10 w7 w5"]
    assert learned == (True,) * 3 + (False,) * 3 + (True,) * 3


def test_the_very_tokens_that_were_sampled_are_kept():
    """`a b` and `ab` are the same text: made anew of the text, another token would stand there."""
    backend = Tokenizer(models.BPE(vocab={"a": 0, "b": 1, "ab": 2, "<eos>": 3}, merges=[("a", "b")]))
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")
    seen = []

    def generate(prompts, **_):
        seen.extend(map(list, prompts))
        return Completions([[0, 1, 3]] * len(prompts), [True] * len(prompts), torch.zeros(3 * len(prompts)))

    class Task(Counting):
        def prompts(self, split, seed, start, count, effort=None):
            return [Prompt("ab", i, {}) for i in range(start, start + count)]

    class Mute(Task):
        def environment(self, prompt, calls):
            episode = super().environment(prompt, calls)
            step = episode.step
            episode.step = lambda action: type(result := step(action))("" if result.done else "ab", result.done)
            return episode

    task = Mute(turns=2)
    renderer = Renderer(tokenizer, (3,))
    _, drawn = roll(generate, renderer, rows_of({"a": task}, 1), OPTIONS, seed=0, group_size=1)
    assert drawn.completions == [[0, 1, 3, 2, 0, 1, 3]]
    assert seen[1] == [2, 0, 1, 3, 2]  # what the second turn was drawn after
    assert task.actions == ["ab", "ab"]
    assert renderer.completions(["ab"]) == [[2, 3]]


class Stumbling(Counting):
    """The first of its environments fails while the others act."""

    def __init__(self):
        super().__init__()
        self.acting, self.closed_while_acting = 0, []

    def environment(self, prompt, calls):
        return _Stumble(self, fails=prompt.answer == 0)


class _Stumble:
    def __init__(self, task, *, fails):
        self.task, self.fails = task, fails

    def step(self, action):
        if self.fails:
            raise StageFailed("the environment is gone")
        self.task.acting += 1
        time.sleep(0.05)
        self.task.acting -= 1
        return Step("", True, 0.0, {})

    def close(self):
        self.task.closed_while_acting.append(self.task.acting > 0)


def test_no_environment_is_closed_while_another_acts(model):
    task = Stumbling()
    with pytest.raises(StageFailed, match="gone"):
        played(model, rows_of({"a": task}, 6))
    assert task.closed_while_acting == [False] * 12
