"""The write-ahead log of a rollout phase: what a killed one had drawn is kept, and nothing else is believed."""

import math
import random
from functools import partial

import pytest
import torch
from engine.models import tiny_policy

from opdctl.engine.journal import PhaseLog, sampler
from opdctl.engine.sampling import Rollout, sample

torch.set_num_threads(1)

PROMPTS = [[3, 4, 5, 6, 7], [8, 9], [10, 11, 12, 13], [14], [15, 16, 17, 18, 19, 20, 21]]
OPTIONS = {"group_size": 4, "max_completion_tokens": 24, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "seed": 7}


class Killed(BaseException):
    pass


@pytest.fixture(scope="module")
def policy():
    return tiny_policy()[0]


def begun(folder, every=5, phase="step-3", seed=0) -> PhaseLog:
    log = PhaseLog(folder, every, seed)
    log.begin(phase)
    return log


def draw(policy, log, prompts=PROMPTS, model="student", **options) -> Rollout:
    return sampler(policy, log, model)(prompts, keys=range(100, 100 + len(prompts)), **(OPTIONS | options))


def killed_after(policy, monkeypatch, steps, action):
    """Do it with a policy whose process dies at its decoding step of this number; whether it died."""
    decode, left = policy.decode, iter(range(steps))

    def dying(*args):
        if next(left, None) is None:
            raise Killed
        return decode(*args)

    with monkeypatch.context() as patched:
        patched.setattr(policy, "decode", dying)
        try:
            action()
        except Killed:
            return True
    return False


def same(one: Rollout, other: Rollout) -> bool:
    return (
        (one.completions, one.finished) == (other.completions, other.finished)
        and torch.equal(one.sampling_logprobs_N, other.sampling_logprobs_N)
        and torch.equal(one.entropy_N, other.entropy_N)
    )


def test_a_call_killed_at_any_step_ends_with_the_bits_of_an_undisturbed_one(policy, tmp_path, monkeypatch):
    undisturbed = draw(policy, begun(tmp_path / "whole"))
    for steps in (0, 3, 4, 5, 11, 18):
        folder = tmp_path / str(steps)
        assert killed_after(policy, monkeypatch, steps, lambda at=folder: draw(policy, begun(at)))
        assert same(draw(policy, begun(folder)), undisturbed)


def test_what_was_drawn_is_not_drawn_again(policy, tmp_path, monkeypatch):
    assert killed_after(policy, monkeypatch, 18, lambda: draw(policy, begun(tmp_path)))
    # parts of 5 tokens take 4 steps each: 4 parts were whole, and one more of 4 tokens is left
    assert not killed_after(policy, monkeypatch, 3, lambda: draw(policy, begun(tmp_path)))
    assert not killed_after(policy, monkeypatch, 0, lambda: draw(policy, begun(tmp_path)))


def test_the_journal_changes_no_token(policy, tmp_path):
    """Contexts are read again at every part, so the last bits may differ, and nothing else."""
    plain = draw(policy, None)
    kept = draw(policy, begun(tmp_path))
    assert kept.completions == plain.completions
    torch.testing.assert_close(kept.sampling_logprobs_N, plain.sampling_logprobs_N, atol=2e-5, rtol=1e-5)


def test_a_torn_tail_is_cut_and_drawn_again(policy, tmp_path, monkeypatch):
    undisturbed = draw(policy, begun(tmp_path / "whole"))
    killed_after(policy, monkeypatch, 14, lambda: draw(policy, begun(tmp_path / "torn")))
    file = tmp_path / "torn" / "step-3.log"
    whole = file.read_bytes()
    for damaged in (whole[:-1], whole[:-200], whole[:5], whole + b"\x07\x00", whole[:-9] + b"x" + whole[-8:]):
        file.write_bytes(damaged)
        assert same(draw(policy, begun(tmp_path / "torn")), undisturbed)
        assert file.read_bytes() == (tmp_path / "whole" / "step-3.log").read_bytes()


@pytest.mark.parametrize(
    "other",
    [
        {"phase": "step-4"},
        {"every": 6},
        {"log_seed": 1},
        {"model": "teacher"},
        {"seed": 8},
        {"temperature": 0.9},
        {"prompts": [*PROMPTS[:-1], [15, 16]]},
    ],
    ids=lambda other: next(iter(other)),
)
def test_a_stale_entry_is_never_believed(policy, tmp_path, other):
    """Whatever the outcome depends on: entries of another call lie in the file of the phase, and are not read."""
    draw(policy, begun(tmp_path))
    phase = other.get("phase", "step-3")
    (tmp_path / "step-3.log").rename(tmp_path / f"{phase}.log")
    log = begun(tmp_path, other.get("every", 5), phase, other.get("log_seed", 0))
    options = {name: value for name, value in other.items() if name in {"seed", "temperature", "prompts", "model"}}
    size = (tmp_path / f"{phase}.log").stat().st_size
    draw(policy, log, **options)
    assert (tmp_path / f"{phase}.log").stat().st_size > size


def test_calls_of_a_phase_may_come_in_any_order(policy, tmp_path):
    first = [draw(policy, begun(tmp_path), PROMPTS[:2]), draw(policy, begun(tmp_path), PROMPTS[2:])]
    log = begun(tmp_path)
    assert same(draw(policy, log, PROMPTS[2:]), first[1])
    assert same(draw(policy, log, PROMPTS[:2]), first[0])


def test_superseded_phases_leave_nothing_on_disk(policy, tmp_path):
    log = begun(tmp_path, phase="step-3")
    draw(policy, log)
    log.begin("step-4")
    draw(policy, log)
    assert len(list(tmp_path.iterdir())) == 2
    log.begin("step-4", alone=True)
    assert [file.name for file in tmp_path.iterdir()] == ["step-4.log"]
    log.clear()
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------------------------- lengths under preemption


LIMIT = 56


def preempted(policy, monkeypatch, folder, rows, go_on) -> list[int]:
    """Lengths of completions that one process after another writes, each killed after 1 to 20 decoding steps.

    `go_on`: unfinished ones are continued from the journal. Else the finished ones are kept as well, and the others
    begun anew with fresh random numbers.
    """
    moment = random.Random(5)
    done: dict[int, int] = {}
    options = OPTIONS | {"group_size": 1, "max_completion_tokens": LIMIT}
    attempt = 0
    while len(done) < rows:
        left = [row for row in range(rows) if row not in done]
        seed = 11 if go_on else 1000 + attempt
        log = begun(folder, every=4, seed=seed)
        kept: list[Rollout] = []
        if not go_on:
            log.clear()

        def run(log=log, left=left, seed=seed, kept=kept):
            drawn = sampler(policy, log, "")([[3]] * len(left), keys=left, **(options | {"seed": seed}))
            kept.append(drawn)

        killed_after(policy, monkeypatch, moment.randint(1, 20), run)
        if kept:
            done |= {row: len(ids) for row, ids in zip(left, kept[0].completions, strict=True)}
        elif not go_on:
            done |= ended_in(log, left)
        attempt += 1
    assert attempt > 3
    return [done[row] for row in range(rows)]


def ended_in(log: PhaseLog, rows: list[int]) -> dict[int, int]:
    """Row -> length of what the journal holds whole."""
    lengths = dict.fromkeys(rows, 0)
    ended: dict[int, int] = {}
    for part in next(iter(log._parts.values()), []):
        going = [row for row in rows if row not in ended and lengths[row] < LIMIT]
        for row, ids, finished in zip(going, part.completions, part.finished, strict=True):
            lengths[row] += len(ids)
            if finished or lengths[row] == LIMIT:
                ended[row] = lengths[row]
    return ended


def test_lengths_are_unbiased_under_preemption_with_the_journal_and_biased_by_starting_anew(tmp_path, monkeypatch):
    """z of the mean length against another, undisturbed sample of the same model, whose lengths vary widely."""
    policy, rows = tiny_policy(5)[0], 600
    options = OPTIONS | {"group_size": rows, "max_completion_tokens": LIMIT, "seed": 99}
    undisturbed = torch.tensor([len(ids) for ids in sample(policy, [[3]], keys=[1], **options).completions]).double()
    assert undisturbed.std() > 0.9 * undisturbed.mean()

    def z(lengths: list[int]) -> float:
        mine = torch.tensor(lengths).double()
        return float(mine.mean() - undisturbed.mean()) / math.sqrt(float(mine.var() + undisturbed.var()) / rows)

    run = partial(preempted, policy, monkeypatch)
    kept, anew = (z(run(tmp_path / str(go_on), rows, go_on)) for go_on in (True, False))
    assert abs(kept) < 2.5
    assert anew < -5
