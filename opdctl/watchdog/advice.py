"""What an alarm of a rule likely means, most likely first, and where the runbooks say more."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Advice:
    runbook: str
    causes: tuple[str, ...]


ADVICE: Mapping[str, Advice] = {
    "no_progress": Advice(
        "runbooks/stuck-run.md#no-progress",
        (
            "the worker waits: for a verifier, an endpoint, a lock, a dead process of its own",
            "the machine swaps, or its disk hangs",
            "one step is that long: raise watch.no_progress.times",
        ),
    ),
    "throughput": Advice(
        "runbooks/stuck-run.md#throughput",
        (
            "other work took the cores or the GPU",
            "the machine swaps: lower resources.micro_batch_tokens",
            "a verifier or an environment answers slowly",
        ),
    ),
    "save_too_old": Advice(
        "runbooks/stuck-run.md#save-too-old",
        (
            "config.train.save_every is large for steps this long",
            "the disk is full or slow",
        ),
    ),
    "not_finite": Advice(
        "runbooks/diagnose-opd-divergence.md#not-finite",
        (
            "the learning rate is too high: lower config.train.optimizer.lr or max_grad_norm",
            "a row has no token in the loss, or an -inf log-probability",
            "a 16-bit precision overflows",
        ),
    ),
    "kl_stuck": Advice(
        "runbooks/diagnose-opd-divergence.md#kl-stuck",
        (
            "the teacher, or the reference, is the policy itself: compare their digests",
            "the learning rate is so low that the weights do not move",
            "the KL is computed on no tokens",
        ),
    ),
    "kl_high": Advice(
        "runbooks/diagnose-opd-divergence.md#kl-high",
        (
            "student and teacher are too far apart: cold start on the teacher's answers first",
            "the learning rate is too high",
            "tokenizer or chat template differ between student and teacher",
        ),
    ),
    "clip_saturated": Advice(
        "runbooks/diagnose-opd-divergence.md#clip-saturated",
        (
            "the sampler's weights or distribution are not the trainer's: compare mismatch_ratio with 1",
            "student and teacher are too far apart for this max_advantage",
            "too many optimizer steps on one rollout batch",
        ),
    ),
    "truncated": Advice(
        "runbooks/diagnose-opd-divergence.md#truncated",
        (
            "max_completion_tokens is too low for these prompts",
            "the policy never learnt to end: SFT on answers with their EOS first",
            "the EOS ids of the model are not those that the sampler stops at",
        ),
    ),
    "one_teacher": Advice(
        "runbooks/diagnose-opd-divergence.md#one-teacher",
        (
            "the rows are sorted by domain: shuffle them",
            "config.data.ratios, or the routes, give everything to one teacher",
        ),
    ),
    "teacher_constant": Advice(
        "runbooks/teacher-mismatch.md#teacher-constant",
        (
            "the teacher runs on random or lost weights: load_format dummy, a sleep without a wake",
            "its folder is not the checkpoint that was meant",
        ),
    ),
    "entropy": Advice(
        "runbooks/entropy-collapse.md#entropy",
        (
            "fallen: the policy repeats itself; lower the learning rate, clip higher (surrogate.high), or add a KL",
            "risen: the policy falls apart; lower the learning rate, look at mismatch_ratio and at the teacher",
            "rollout.temperature is not what the loss assumes",
        ),
    ),
    "zero_advantage": Advice(
        "runbooks/entropy-collapse.md#zero-advantage",
        (
            "the grader gives everything the same: try it on reference answers (opdctl check)",
            "the prompts are too hard, or too easy, for this policy",
            "answers are cut before they give a result",
            "all answers of a group are the same text: look at entropy",
        ),
    ),
    "zero_gradient": Advice(
        "runbooks/entropy-collapse.md#zero-gradient",
        (
            "no token is in the loss: all masked, or all advantages 0",
            "the teacher is the student",
            "the learning rate is 0: schedule, warmup_steps and max_steps",
        ),
    ),
    "reward_hack": Advice(
        "runbooks/entropy-collapse.md#reward-hack",
        (
            "the policy found answers that the grader likes and nobody wants: read some (opdctl data show)",
            "the grader rewards length",
            "the judge model agrees with whatever is long",
        ),
    ),
}
