"""rollout.journal in every stage that draws: killed amid a phase, it goes on from what was drawn, to the bit."""

import hashlib
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from engine.counting import Counting
from engine.models import tiny_policy
from engine.stages import opd, rlvr, run, spec_of, train

from opdctl.backends.contract import InputSpec
from opdctl.engine.journal import PhaseLog, sampler
from opdctl.engine.qwen3 import Qwen3Policy
from opdctl.engine.rows import Mixer, Renderer, roll
from opdctl.settings import Mixture, Rollout, Turns

EVERY = 6
ROLLOUT = {"prompts": 4, "group_size": 2, "max_prompt_tokens": 10, "max_completion_tokens": 40}
ROLLOUT["journal"] = {"every_tokens": EVERY}
NEW = InputSpec("init", "model:", "")
DATA = {"tasks": ["math", "code"], "efforts": ["low", "max"]}
FEW = {"micro_batch_tokens": 200}  # many calls of few rows


def dynamic(folder, teacher):
    """With rounds, and with saves that are four phases apart."""
    config = {"dynamic_sampling": {"max_rounds": 2}, "train": train(8, 8) | {"save_every": 4}}
    return replace(rlvr(folder, teacher, rollout=ROLLOUT, **config), inputs=[NEW])


def waiting(folder, teacher):
    """With completions that wait for the next batch."""
    rollout = ROLLOUT | {"max_completion_tokens": 100, "partial": {"done_fraction": 0.6, "max_staleness": 2}}
    config = {"rollout": rollout, "mismatch": {"rule": "tis", "cap": 5.0}, "train": train(6, 8) | {"save_every": 3}}
    return replace(rlvr(folder, teacher, **config), inputs=[NEW])


def distilled(folder, teacher, **config):
    teachers = {(domain, effort): teacher for domain in ("math", "code") for effort in ("low", "max")}
    rollout = ROLLOUT | {"prompts": 8, "group_size": 1}
    spec = opd(folder, teacher, teachers, {"form": "full_vocab"}, rollout=rollout, train=train(4, 8), **config)
    return replace(spec, inputs=[replace(NEW, role="student"), *spec.inputs[1:]])


def sampled(folder, teacher):
    config = {"data": DATA, "rollout": ROLLOUT, "keep": "all", "save_every": 2}
    return spec_of(folder, "sample", config, [replace(NEW, role="model")], resources=FEW)


def examined(folder, teacher):
    models = [replace(NEW, role="models"), InputSpec("models", "teacher", str(teacher))]
    return spec_of(folder, "eval", {"data": DATA, "rollout": ROLLOUT}, models, resources=FEW)


STAGES = {
    "rlvr": dynamic,
    "rlvr with partial rollouts": waiting,
    "opd": distilled,
    "opd sampled by the teachers": partial(distilled, sampled_by="teacher"),
    "sample": sampled,
    "eval": examined,
}


class Killed(BaseException):
    pass


@pytest.fixture
def decoded(monkeypatch):
    """Counts decoding steps; `decoded(n)`: the process dies at step n from now on."""
    decode, state = Qwen3Policy.decode, {"done": 0, "dies": -1}

    def counting(self, *args):
        if state["done"] == state["dies"]:
            raise Killed
        state["done"] += 1
        return decode(self, *args)

    def reset(dies=-1):
        done = state["done"]
        state.update(done=0, dies=dies)
        return done

    monkeypatch.setattr(Qwen3Policy, "decode", counting)
    return reset


def digests(folder: Path):
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in Path(folder).iterdir()}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory) -> Path:
    config = {"rollout": ROLLOUT | {"max_completion_tokens": 1}, "train": train(1, 8)}
    spec = replace(rlvr(tmp_path_factory.mktemp("teacher"), Path(), **config), inputs=[NEW])
    run(spec)
    return Path(spec.output)


@pytest.mark.parametrize("kind", STAGES)
def test_a_stage_killed_amid_a_phase_goes_on_to_the_bit(tmp_path, teacher, decoded, kind):
    whole, cut = STAGES[kind](tmp_path / "whole", teacher), STAGES[kind](tmp_path / "cut", teacher)
    run(whole)
    steps = decoded()
    for share in (0.3, 0.4):
        dies = round(share * steps)
        decoded(dies)
        with pytest.raises(Killed):
            run(cut)
        assert list(Path(cut.state, "journal").glob("*.log"))
        steps -= dies - EVERY  # nothing is drawn again but the part that was cut short
    decoded()
    run(cut)
    assert decoded() <= steps
    assert digests(cut.output) == digests(whole.output)


def test_an_episode_plays_its_finished_turns_from_the_journal(tmp_path, decoded):
    policy, tokenizer = tiny_policy()
    policy.eos_ids = (2, *range(15, 29))
    options = Rollout(
        prompts=3,
        max_prompt_tokens=4,
        max_completion_tokens=40,
        turns=Turns(max_turns=4, max_turn_tokens=5, max_observation_tokens=8),
    )

    def play(folder, task):
        log = PhaseLog(folder, 2, 0)
        log.begin("step-0")
        rows = Mixer({"a": task}, Mixture(tasks=["a"]), "train", 0).rows(0, 3)
        renderer = Renderer(tokenizer, policy.eos_ids)
        return roll(sampler(policy, log, "policy"), renderer, rows, options, seed=3, group_size=2)[1]

    undisturbed = Counting()
    whole = play(tmp_path / "whole", undisturbed)
    steps = decoded()
    decoded(steps - 1)
    with pytest.raises(Killed):
        play(tmp_path / "cut", Counting())
    decoded()
    resumed = Counting()
    again = play(tmp_path / "cut", resumed)
    assert decoded() <= 2
    assert resumed.actions == undisturbed.actions
    assert (again.completions, again.learned, again.episodes) == (whole.completions, whole.learned, whole.episodes)
    assert again.sampling_logprobs_N.equal(whole.sampling_logprobs_N)
