"""The watchdog is quiet on a healthy stream, and names a planted fault within five steps."""

import math
import random
import re
from pathlib import Path

import pytest

from opdctl.backends.contract import Event
from opdctl.settings import WatchSettings
from opdctl.watchdog import Watch
from opdctl.watchdog.advice import ADVICE

STEPS = 60
FAULT = 30  # the first faulty step


def healthy(kind, steps=STEPS, seed=0):
    """A stage that learns, noise included."""
    noise = random.Random(seed)
    for step in range(1, steps + 1):
        done = step / steps
        jitter = noise.gauss(0, 1)
        metrics = {"loss": 1.5 - done + 0.05 * jitter, "grad_norm": 1.0 + 0.2 * abs(jitter), "lr": 1e-3 * (1.0 - done)}
        metrics["tokens_per_s"] = 1000.0 * (1 + 0.2 * jitter)
        if kind != "sft":
            accuracy = min(1.0, max(0.0, 0.2 + 0.6 * done + 0.05 * jitter))
            metrics |= {"accuracy": accuracy, "reward": accuracy, "length": 40 + 40 * done + jitter, "truncated": 0.1}
            metrics |= {"clip_fraction": 0.02, "mismatch_fraction": 0.05}
        if kind == "rlvr":
            metrics |= {"entropy": 1.0 - 0.6 * done + 0.05 * jitter, "tied_groups": 0.4, "reference_kl": 0.02 * done}
        if kind == "opd":
            metrics |= {"reverse_kl": 0.5 - 0.4 * done + 0.02 * jitter, "student_entropy": 0.9 + 0.03 * jitter}
            metrics |= {"teacher_entropy": 0.8, "teacher_entropy_share": 0.15, "teacher_entropy_std": 0.5}
            metrics |= {"teacher_share": 0.4, "teacher_most": float(step % 3), "teacher_canary": 0.0}
        yield Event(step, steps, metrics, "train", 10.0 * step)


def planted(kind, fault):
    """Healthy up to FAULT; from there on `fault(metrics, steps since)` is laid over it."""
    for event in healthy(kind):
        if event.step < FAULT:
            yield event
        else:
            more = fault(event.metrics, event.step - FAULT)
            yield Event(event.step, event.total, {**event.metrics, **more}, "train", event.time)


def alarms(kind, events, settings=None):
    watch = Watch(kind, settings or WatchSettings(), save_every=None)
    return [alarm for event in events for alarm in watch.see(event)]


def hacked(metrics, since):
    return {"reward": 0.95, "accuracy": 0.95, "length": 4 * metrics["length"]}


FAULTS = {
    "loss nan": ("not_finite", "sft", lambda m, n: {"loss": math.nan}),
    "grad inf": ("not_finite", "opd", lambda m, n: {"grad_norm": math.inf}),
    "all advantages zero": (
        "zero_advantage",
        "rlvr",
        lambda m, n: {"tied_groups": 1.0, "reward": 0.0, "accuracy": 0.0},
    ),
    "verl's advantages zero": (
        "zero_advantage",
        "rlvr",
        lambda m, n: {"tied_groups": None, "verl/critic/advantages/max": 0.0, "verl/critic/advantages/min": 0.0},
    ),
    "no gradient": ("zero_gradient", "sft", lambda m, n: {"grad_norm": 0.0}),
    "all truncated": ("truncated", "rlvr", lambda m, n: {"truncated": 1.0}),
    "almost all truncated": ("truncated", "opd", lambda m, n: {"truncated": 0.95}),
    "KL at 0": ("kl_stuck", "opd", lambda m, n: {"reverse_kl": 0.0}),
    "KL to the reference at 0": ("kl_stuck", "rlvr", lambda m, n: {"reference_kl": 0.0}),
    "KL explodes": ("kl_high", "opd", lambda m, n: {"reverse_kl": 20.0}),
    "KL grows": ("kl_high", "opd", lambda m, n: {"reverse_kl": 0.5 * 2.0 ** (n + 1)}),
    "KL to the reference explodes": ("kl_high", "rlvr", lambda m, n: {"reference_kl": 30.0}),
    "entropy collapses": ("entropy", "rlvr", lambda m, n: {"entropy": 0.01}),
    "entropy collapses in distillation": ("entropy", "opd", lambda m, n: {"student_entropy": 0.01}),
    "entropy explodes": ("entropy", "rlvr", lambda m, n: {"entropy": 5.0}),
    "teacher uniform": (
        "teacher_constant",
        "opd",
        lambda m, n: {"teacher_entropy_share": 1.0, "teacher_entropy": 5.7, "teacher_entropy_std": 0.0},
    ),
    "teacher constant": (
        "teacher_constant",
        "opd",
        lambda m, n: {"teacher_entropy": 1.3, "teacher_entropy_std": 0.0},
    ),
    "canary moves": ("teacher_constant", "opd", lambda m, n: {"teacher_canary": 0.2, "teacher_canary/max[a=1]": 0.2}),
    "canary says nan": ("teacher_constant", "opd", lambda m, n: {"teacher_canary": math.inf}),
    "canary at -ln V": ("teacher_constant", "opd", lambda m, n: {"teacher_off_uniform": 0.0}),
    "clip everywhere": ("clip_saturated", "opd", lambda m, n: {"clip_fraction": 0.97}),
    "mismatch everywhere": ("clip_saturated", "rlvr", lambda m, n: {"mismatch_fraction": 0.9}),
    "ratio clipped everywhere": ("clip_saturated", "opd", lambda m, n: {"ratio_clip_fraction": 1.0}),
    "reward and length jump": ("reward_hack", "rlvr", hacked),
    "reward up, accuracy down": (
        "reward_hack",
        "rlvr",
        lambda m, n: {"reward": 0.9, "accuracy": 0.02},
    ),
    "one teacher at a time": ("one_teacher", "opd", lambda m, n: {"teacher_share": 1.0, "teacher_most": 2.0}),
}


@pytest.mark.parametrize("kind", ["sft", "rlvr", "opd"])
@pytest.mark.parametrize("seed", range(20))
def test_healthy_streams_raise_no_alarm(kind, seed):
    assert alarms(kind, healthy(kind, 200, seed)) == []


@pytest.mark.parametrize("name", FAULTS)
def test_planted_fault_is_named_within_five_steps_and_told_once(name):
    rule, kind, fault = FAULTS[name]
    found = alarms(kind, planted(kind, fault))
    assert [alarm.rule for alarm in found] == [rule]
    assert FAULT <= found[0].step <= FAULT + 4


@pytest.mark.parametrize("name", FAULTS)
def test_evidence_has_numbers_and_every_alarm_its_causes_and_runbook(name):
    rule, kind, fault = FAULTS[name]
    [alarm] = alarms(kind, planted(kind, fault))
    assert re.search(r"\d|nan|inf", alarm.evidence)
    assert alarm.causes
    assert re.fullmatch(r"runbooks/[a-z-]+\.md#[a-z-]+", alarm.runbook)


def test_every_rule_has_advice():
    rules = {name for name in WatchSettings.model_fields if name != "enabled"}
    assert set(ADVICE) == rules


def test_a_fault_that_was_well_in_between_is_told_again():
    def twice(metrics, since):
        return {"truncated": 1.0} if since < 6 or since >= 15 else {}

    assert [alarm.step for alarm in alarms("rlvr", planted("rlvr", twice))] == [FAULT + 4, FAULT + 19]


def test_a_fault_that_blinks_is_told_once():
    def blinks(metrics, since):
        return {"truncated": 0.1} if since == 8 else {"truncated": 1.0}

    assert len(alarms("rlvr", planted("rlvr", blinks))) == 1


def test_equal_rewards_of_a_policy_that_solves_its_prompts_are_no_fault():
    solved = {"tied_groups": 1.0, "accuracy": 1.0, "reward": 1.0, "grad_norm": 0.0, "entropy": 0.001}
    assert alarms("rlvr", planted("rlvr", lambda m, n: solved)) == []


def test_a_student_may_take_over_its_teachers_entropy():
    def moved(metrics, since):
        return {"student_entropy": 0.02, "teacher_entropy": 0.02}

    assert alarms("opd", planted("opd", moved)) == []


def test_teachers_that_take_turns_in_small_batches_are_mixed():
    def turns(metrics, since):
        return {"teacher_share": 1.0, "teacher_most": float(since % 2)}

    assert alarms("opd", planted("opd", turns)) == []


def test_longer_answers_earning_more_little_by_little_are_no_hack():
    def grows(metrics, since):
        return {"length": metrics["length"] * 1.1**since}

    assert alarms("rlvr", planted("rlvr", grows)) == []


NO_FAULTS = {
    "longer answers that earn no more": ("rlvr", lambda m, n: {"length": 4 * m["length"]} if n >= 0 else {}),
    "more reward for answers as long": ("rlvr", lambda m, n: {"reward": 0.95, "accuracy": 0.95} if n >= 0 else {}),
    "a low entropy that rises a little": ("rlvr", lambda m, n: {"entropy": 0.01 if n < 0 else 0.08}),
    "a teacher sure of every token": ("opd", lambda m, n: {"teacher_entropy": 0.02, "teacher_entropy_std": 0.0}),
    "a KL that grows from next to nothing": ("opd", lambda m, n: {"reverse_kl": 0.001 if n < 0 else 0.15}),
}


@pytest.mark.parametrize("name", NO_FAULTS)
def test_what_looks_like_a_fault_and_is_none_raises_no_alarm(name):
    kind, change = NO_FAULTS[name]
    stream = (
        Event(
            event.step, event.total, {**event.metrics, **change(event.metrics, event.step - FAULT)}, "train", event.time
        )
        for event in healthy(kind)
    )
    assert alarms(kind, stream) == []


def test_numbers_that_no_backend_should_tell_are_passed_over():
    def odd(metrics, since):
        return {"loss": 10**400, "entropy": None, "reward": "words", "length": {"mean": 3}, "truncated": math.nan}

    assert [alarm.rule for alarm in alarms("rlvr", planted("rlvr", odd))] == ["not_finite"]


def test_steps_seen_before_and_preparations_are_passed_over():
    cut = Event(0, STEPS, {"truncated": 1.0}, "gate", 0.0)
    stream = list(planted("rlvr", lambda m, n: {"truncated": 1.0}))
    watch = Watch("rlvr", WatchSettings())
    for event in [cut] * 20 + stream[: FAULT + 1]:
        assert watch.see(event) == []
    assert [alarm for _ in range(10) for alarm in watch.see(stream[FAULT])] == []  # the same step again


# ------------------------------------------------------------------------------------------- what no event tells


def test_a_stage_that_says_nothing_for_much_longer_than_its_steps_take_is_stuck():
    stuck = Watch("rlvr", WatchSettings())
    for event in list(healthy("rlvr"))[:20]:  # 10 s a step
        stuck.see(event)
    assert stuck.tick(1000.0) == []
    assert stuck.tick(1000.0 + 1799) == []
    [alarm] = stuck.tick(1000.0 + 1801)
    assert (alarm.rule, alarm.action, alarm.step) == ("no_progress", "stop", 20)
    assert "no event for 1801 s after step 20 of 60; a step takes 10 s" in alarm.evidence
    assert stuck.tick(1000.0 + 4000) == []  # told once


def test_slow_steps_get_more_time_and_the_first_and_the_end_most():
    settings = WatchSettings.model_validate({"no_progress": {"times": 3, "least_s": 1, "start_s": 500}})
    watch = Watch("opd", settings)
    watch.tick(0.0)
    assert watch.tick(499.0) == []
    for step in range(1, 5):
        watch.see(Event(step, 5, {}, "train", 100.0 * step))
    watch.tick(1000.0)
    assert watch.tick(1299.0) == []
    assert [alarm.rule for alarm in watch.tick(1301.0)] == ["no_progress"]
    watch.see(Event(5, 5, {}, "train", 500.0))  # publishes now
    watch.tick(2000.0)
    assert watch.tick(2499.0) == []
    assert [alarm.rule for alarm in watch.tick(2501.0)] == ["no_progress"]


def test_any_event_is_a_sign_of_life():
    watch = Watch("eval", WatchSettings.model_validate({"no_progress": {"least_s": 1, "start_s": 10}}))
    for at in range(0, 100, 9):
        watch.see(Event(0, 3, {}, "base 4/10", float(at)))
        assert watch.tick(float(at)) == []
    assert [(alarm.rule, alarm.action) for alarm in watch.tick(120.0)] == [("no_progress", "warn")]


def test_a_worker_whose_clock_is_set_does_not_look_stuck_or_slow():
    watch = Watch("rlvr", WatchSettings())
    for event in healthy("rlvr"):
        shift = 1e6 if event.step == 30 else -1e6 if event.step > 40 else 0.0
        found = watch.see(Event(event.step, event.total, event.metrics, "train", event.time + shift))
        assert [*found, *watch.tick(10.0 * event.step)] == []


def test_steps_that_take_much_longer_with_fewer_tokens_a_second_are_told():
    def events(rate):
        at = 0.0
        for event in healthy("rlvr"):
            at += 10.0 if event.step < FAULT else 100.0
            slow = {"tokens_per_s": rate} if event.step >= FAULT else {}
            yield Event(event.step, event.total, {**event.metrics, **slow}, "train", at)

    [alarm] = alarms("rlvr", events(50.0))
    assert alarm.rule == "throughput"
    assert FAULT <= alarm.step <= FAULT + 4
    assert alarms("rlvr", events(1000.0)) == []  # longer answers


def test_a_save_that_does_not_come_is_told_and_one_that_does_ends_it():
    watch = Watch("sft", WatchSettings(), save_every=5)
    events = list(healthy("sft", 40))
    for event in events[:16]:
        watch.see(event)
        found = watch.saved(None, 10.0 * event.step)
        assert [alarm.rule for alarm in found] == (["save_too_old"] if event.step == 16 else [])
    assert "nothing is saved yet, 150 s and 16 steps ago (config.train.save_every: 5)" in found[0].evidence
    watch.see(events[16])
    assert watch.saved(17, 170.0) == []


def test_a_save_of_many_hours_ago_is_told():
    watch = Watch("sft", WatchSettings(), save_every=1000)
    for event in list(healthy("sft", 40))[:10]:
        watch.see(event)
    assert watch.saved(5, 0.0) == []
    assert watch.saved(5, 14399.0) == []
    assert [alarm.rule for alarm in watch.saved(5, 14401.0)] == ["save_too_old"]


# ------------------------------------------------------------------------------------------------------- resumed


def test_a_resumed_attempt_keeps_the_start_that_entropy_is_held_against():
    stream = list(planted("rlvr", lambda m, n: {"entropy": 0.01}))
    anew, resumed = Watch("rlvr", WatchSettings()), Watch("rlvr", WatchSettings())
    resumed.go_on(stream[: FAULT - 1])
    told = [alarm.rule for event in stream[FAULT - 1 :] for alarm in resumed.see(event)]
    assert told == ["entropy"]
    assert [alarm.rule for event in stream[FAULT - 1 :] for alarm in anew.see(event)] == []


def test_a_resumed_attempt_with_the_same_fault_is_told_again_after_as_many_steps():
    stream = list(planted("rlvr", lambda m, n: {"truncated": 1.0}))
    watch = Watch("rlvr", WatchSettings())
    watch.go_on(stream[: FAULT + 10])
    assert [alarm.step for event in stream for alarm in watch.see(event)] == [FAULT + 15]


# ----------------------------------------------------------------------------------------------------- settings


def test_rules_can_be_given_an_action_and_thresholds_or_turned_off():
    stream = list(planted("rlvr", lambda m, n: {"truncated": 0.6}))
    given = WatchSettings.model_validate({"truncated": {"share": 0.5, "steps": 2, "action": "pause"}})
    assert [(alarm.rule, alarm.action, alarm.step) for alarm in alarms("rlvr", stream, given)] == [
        ("truncated", "pause", FAULT + 1)
    ]
    off = WatchSettings.model_validate({"truncated": {"share": 0.5, "action": "off"}})
    assert alarms("rlvr", stream, off) == []
    assert alarms("rlvr", stream, WatchSettings.model_validate({"enabled": False, "truncated": {"share": 0.5}})) == []


def test_an_evaluation_is_only_watched_for_progress_and_only_warned_of_unless_the_user_says_otherwise():
    assert {name: rule.action for name, rule in WatchSettings().rules("eval").items()} == {"no_progress": "warn"}
    given = WatchSettings.model_validate({"no_progress": {"action": "stop"}})
    assert given.rules("eval")["no_progress"].action == "stop"


def test_a_stages_own_thresholds_are_laid_over_the_pipelines():
    ours = WatchSettings.model_validate({"truncated": {"share": 0.5, "steps": 2}, "entropy": {"action": "pause"}})
    own = WatchSettings.model_validate({"truncated": {"steps": 9}, "kl_stuck": {"action": "off"}})
    both = ours.with_own(own)
    assert (both.truncated.share, both.truncated.steps) == (0.5, 9)
    assert (both.entropy.action, both.kl_stuck.action, both.enabled) == ("pause", "off", True)
    assert ours.with_own(None) is ours
    assert not ours.with_own(WatchSettings(enabled=False)).enabled


@pytest.mark.parametrize("rule", sorted(set(ADVICE)))
def test_runbook_of_an_alarm_has_its_section(rule):
    path, _, anchor = ADVICE[rule].runbook.partition("#")
    document = Path(__file__).resolve().parent.parent / path
    if not document.exists():
        pytest.fail(f"{path} is missing")
    headings = re.findall(r"^#+ (.+)$", document.read_text(), re.MULTILINE)
    assert anchor in {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
