import math

import numpy as np
import pytest
import torch
from engine.models import tiny_policy

from opdctl.engine.batch import Sequence, collate
from opdctl.engine.decoding import uniforms
from opdctl.engine.sampling import Draft, Drawing, Rollout, Until, sample, write
from opdctl.errors import OpdctlError

torch.set_num_threads(1)

PROMPTS = [[3, 4, 5, 6, 7], [8, 9], [10, 11, 12, 13], [14], [15, 16, 17, 18, 19, 20, 21]]


@pytest.fixture(scope="module")
def policy():
    return tiny_policy()[0]


def draw(policy, prompts=PROMPTS, **options) -> Rollout:
    given = {
        "group_size": 2,
        "max_completion_tokens": 12,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "seed": 7,
        "keys": range(100, 100 + len(prompts)),
        **options,
    }
    return sample(policy, prompts, **given)


def recomputed(policy, prompts, rollout, group_size, temperature=1.0) -> torch.Tensor:
    """log-probabilities [N, V] of every token, by one uncached forward pass."""
    completions = zip((p for p in prompts for _ in range(group_size)), rollout.completions, strict=True)
    sequences = [Sequence(tuple(prompt), tuple(completion)) for prompt, completion in completions]
    batch = collate(sequences, share_prefixes=False, pad_id=0)
    with torch.no_grad():
        logits = policy.hidden(batch) @ policy.head().T
    return (logits / temperature).log_softmax(-1), batch.targets_N


def test_order_and_company_of_the_prompts_change_nothing(policy):
    whole = draw(policy, group_size=3)
    order = [3, 0, 4, 2]
    part = draw(policy, [PROMPTS[i] for i in order], group_size=3, keys=[100 + i for i in order])
    assert part.completions == [whole.completions[3 * i + g] for i in order for g in range(3)]


def test_dropping_finished_rows_changes_nothing(policy, monkeypatch):
    usual = draw(policy, group_size=4)
    assert len(set(map(len, usual.completions))) > 2
    for share in (0.0, 2.0):  # never, and at every step
        monkeypatch.setattr("opdctl.engine.decoding._DENSE", share)
        assert draw(policy, group_size=4).completions == usual.completions


def test_drafts_pause_once_enough_have_ended_and_all_that_press_and_go_on_as_if_they_had_not(policy, monkeypatch):
    whole = draw(policy, group_size=4)
    longest = max(range(20), key=lambda i: len(whole.completions[i]) * whole.finished[i])
    drawing = Drawing(1.0, 1.0, 0, 12, seed=7)
    prefill, calls = policy.prefill, []
    monkeypatch.setattr(policy, "prefill", lambda *args: calls.append(1) or prefill(*args))
    for pressing in ([False] * 20, [i == longest for i in range(20)]):
        calls.clear()
        drafts = [Draft(prompt, 100 + p, i) for p, prompt in enumerate(PROMPTS) for i in range(4)]
        write(policy, drafts, drawing, until=Until(3, pressing))
        assert len(calls) == 1  # nothing was read again
        steps = max(len(draft.tokens) for draft in drafts)
        ended = [len(ids) <= steps for ids, done in zip(whole.completions, whole.finished, strict=True) if done]
        assert sum(ended) >= 3
        if any(pressing):
            assert steps == len(whole.completions[longest])
        else:
            assert sum(len(ids) < steps for ids in whole.completions) < 3
        assert not all(draft.finished for draft in drafts)
        write(policy, [draft for draft in drafts if not draft.finished], drawing)
        assert [draft.tokens for draft in drafts] == whole.completions


def test_samples_of_a_group_and_seeds_and_keys_differ(policy):
    rollout = draw(policy, group_size=4)
    for i in range(len(PROMPTS)):
        assert len(set(map(tuple, rollout.completions[4 * i : 4 * i + 4]))) > 1
    assert draw(policy, seed=8).completions != draw(policy).completions
    assert draw(policy, keys=range(200, 205)).completions != draw(policy).completions


def test_completions_end_at_the_first_eos_or_at_the_limit(policy, monkeypatch):
    monkeypatch.setattr(policy, "eos_ids", (2, 5, 9, 20))
    rollout = draw(policy, group_size=16)
    assert any(rollout.finished)
    assert not all(rollout.finished)
    for completion, finished in zip(rollout.completions, rollout.finished, strict=True):
        at = [i for i, token in enumerate(completion) if token in policy.eos_ids]
        assert at == ([len(completion) - 1] if finished else [])
        assert finished or len(completion) == 12


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probabilities_and_entropy_are_those_of_a_plain_forward_pass(policy, temperature):
    rollout = draw(policy, temperature=temperature)
    logprobs_NV, targets_N = recomputed(policy, PROMPTS, rollout, 2, temperature)
    expected = logprobs_NV.gather(-1, targets_N[:, None])[:, 0]
    torch.testing.assert_close(rollout.sampling_logprobs_N, expected, atol=2e-5, rtol=1e-5)
    entropy = -(logprobs_NV.exp() * logprobs_NV).sum(-1)
    torch.testing.assert_close(rollout.entropy_N, entropy, atol=2e-5, rtol=1e-5)


def test_truncated_distributions_are_renormalised(policy):
    """Top-k, then the smallest set of at least top-p of what is left: against a loop over sorted tokens."""
    rollout = draw(policy, group_size=8, top_k=6, top_p=0.7, temperature=1.5)
    logprobs_NV, targets_N = recomputed(policy, PROMPTS, rollout, 8, 1.5)
    for n, row in enumerate(logprobs_NV.double().exp().tolist()):
        best = sorted(range(len(row)), key=lambda token: -row[token])[:6]
        total = sum(row[token] for token in best)
        kept, mass = [], 0.0
        while mass < 0.7 * total:
            kept.append(best[len(kept)])
            mass += row[kept[-1]]
        assert int(targets_N[n]) in kept
        shares = [row[token] / mass for token in kept]
        assert float(rollout.sampling_logprobs_N[n]) == pytest.approx(math.log(row[int(targets_N[n])] / mass), abs=1e-4)
        assert float(rollout.entropy_N[n]) == pytest.approx(-sum(p * math.log(p) for p in shares), abs=1e-4)


@pytest.mark.parametrize(("top_p", "top_k"), [(1.0, 0), (0.8, 0), (1.0, 5)])
def test_tokens_follow_the_distribution(policy, top_p, top_k):
    """Chi-square of 4096 first tokens against their probabilities."""
    count = 4096
    rollout = draw(policy, [PROMPTS[0]], group_size=count, max_completion_tokens=1, top_p=top_p, top_k=top_k, keys=[1])
    seen = np.bincount([completion[0] for completion in rollout.completions], minlength=policy.vocab_size)
    logprobs = {c[0]: float(lp) for c, lp in zip(rollout.completions, rollout.sampling_logprobs_N, strict=True)}
    likely = [token for token, logprob in logprobs.items() if math.exp(logprob) * count > 5]
    assert len(likely) > 3
    expected = np.array([math.exp(logprobs[token]) * count for token in likely])
    chi_square = ((seen[likely] - expected) ** 2 / expected).sum()
    freedom = len(likely) - 1
    assert chi_square < freedom + 4 * math.sqrt(2 * freedom)


def test_greedy_takes_the_likeliest_token(policy):
    rollout = draw(policy, group_size=1, greedy=True)
    logprobs_NV, targets_N = recomputed(policy, PROMPTS, rollout, 1)
    assert torch.equal(logprobs_NV.argmax(-1), targets_N)


def grid(seed, keys, group_size, steps, first=0):
    """Rows prompt-major, as a rollout's."""
    rows = [(key, sample) for key in keys for sample in range(group_size)]
    return uniforms(seed, *zip(*rows, strict=True), [first] * len(rows), steps)


def test_uniform_numbers_depend_on_all_their_coordinates():
    numbers = grid(3, [1, 2, -5], 4, 50)
    assert numbers.shape == (12, 50)
    assert len(np.unique(numbers)) == numbers.size
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert np.array_equal(grid(3, [2], 4, 20), numbers[4:8, :20])
    assert np.array_equal(grid(3, [2], 4, 20, first=30), numbers[4:8, 30:])
    assert not np.isin(grid(4, [1, 2, -5], 4, 50), numbers).any()


def test_uniform_numbers_are_uniform_and_uncorrelated():
    numbers = grid(0, range(64), 8, 64)
    for axis_pairs in (numbers, numbers.T):
        neighbours = np.corrcoef(axis_pairs[:-1].ravel(), axis_pairs[1:].ravel())[0, 1]
        assert abs(neighbours) < 4 / math.sqrt(numbers.size)
    counts = np.histogram(numbers, bins=64, range=(0, 1))[0]
    chi_square = ((counts - numbers.size / 64) ** 2 / (numbers.size / 64)).sum()
    assert chi_square < 63 + 4 * math.sqrt(126)


def test_prompts_that_cannot_be_continued_are_refused(policy):
    with pytest.raises(OpdctlError, match="at least one token"):
        draw(policy, [[3], []])
    with pytest.raises(OpdctlError, match="does not fit the model"):
        draw(policy, [[3] * 60])
