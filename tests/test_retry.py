"""Which failures are tried again: by rule, and with workers that die at the toy backend's knobs."""

import shutil
import signal

import pytest
import toy

from opdctl.errors import ConfigError
from opdctl.retry import Again, Retries
from opdctl.settings import Retry
from opdctl.supervisor import EXIT_BUG, EXIT_DIED, EXIT_FAILED
from opdctl.tracking.journal import curves


def settings(**given) -> Retry:
    return Retry.model_validate({"attempts": 3, "wait_s": 2.0, "factor": 3.0} | given)


@pytest.mark.parametrize("code", [-signal.SIGKILL, -signal.SIGTERM, -signal.SIGHUP, -signal.SIGABRT, None, EXIT_DIED])
def test_a_death_by_a_signal_may_pass(code):
    assert Retries().next("sft", settings(), code) == Again(2.0, 1, 3)


@pytest.mark.parametrize("code", [EXIT_FAILED, EXIT_BUG, 0, 2, 75, 9, -signal.SIGSEGV, -signal.SIGILL, -signal.SIGFPE])
def test_what_was_told_or_is_its_own_making_does_not(code):
    assert Retries().next("sft", settings(), code) is None


def test_listed_exit_codes_may_pass():
    assert Retries().next("sft", settings(exit_codes=[9]), 9) is not None
    assert Retries().next("sft", settings(exit_codes=[9]), 10) is None


@pytest.mark.parametrize(("code", "why"), [(0, "no failure"), (1, "was told"), (2, "configuration"), (75, "asked for")])
def test_errors_that_are_the_users_cannot_be_listed(tmp_path, code, why):
    with pytest.raises(ConfigError, match=f"retry.*exit_codes: {code} is .*{why}"):
        toy.pipeline({"sft": toy.sft()}, folder=tmp_path, retry={"exit_codes": [code]})


def test_each_wait_is_longer_and_each_stage_has_its_own_count():
    retries = Retries()
    waits = [retries.next("a", settings(), -9) for _ in range(4)]
    assert waits == [Again(2.0, 1, 3), Again(6.0, 2, 3), Again(18.0, 3, 3), None]
    assert retries.next("b", settings(), -9) == Again(2.0, 1, 3)


def test_no_wait_is_longer_than_a_day_however_many_there_are():
    retries = Retries()
    longest = [retries.next("a", settings(attempts=100, wait_s=1e4, factor=100), -9) for _ in range(100)][-1]
    assert longest == Again(86400.0, 100, 100)


def test_a_failure_that_cannot_pass_uses_no_attempt_up():
    retries = Retries()
    assert retries.next("a", settings(attempts=1), EXIT_FAILED) is None
    assert retries.next("a", settings(attempts=1), -9) is not None


# ------------------------------------------------------------------------------------------------ real workers


def pipeline(folder, knobs, *, steps=6, **more):
    given = {"retry": {"attempts": 2, "wait_s": 0}} | more
    return toy.pipeline({"sft": toy.sft(steps=steps)}, knobs={"plain": knobs}, folder=folder, **given)


def carry_out(wanted):
    notes = toy.Notes()
    outcome = toy.run(wanted, reporter=notes)
    told = [text for (text,) in notes.of("message") if "tried again" in text]
    return outcome, len(toy.stage(wanted, "sft").attempts()), told


@pytest.fixture
def undisturbed(tmp_path):
    wanted = pipeline(tmp_path / "undisturbed", {})
    toy.run(wanted)
    return toy.digests(wanted)


@pytest.mark.parametrize("knob", ["kill_at", "program_dies_at"])
def test_a_killed_stage_goes_on_from_its_save_and_ends_as_if_undisturbed(tmp_path, undisturbed, knob):
    wanted = pipeline(tmp_path / "killed", {knob: 5})
    outcome, attempts, told = carry_out(wanted)
    assert (outcome.done, outcome.failed, attempts) == (["sft"], {}, 2)
    assert toy.digests(wanted) == undisturbed
    [line] = told
    assert "was killed by SIGKILL" in line
    assert "tried again in 0 s (1 of 2)" in line
    events = (toy.stage(wanted, "sft").attempts()[-1].events).read_text().splitlines()
    assert '"step": 5' in events[0] or '"step":5' in events[0]  # step 4 was saved


def test_one_killed_before_its_first_save_begins_anew(tmp_path, undisturbed):
    wanted = pipeline(tmp_path / "killed", {"kill_at": 1})
    outcome, attempts, _ = carry_out(wanted)
    assert (outcome.done, attempts) == (["sft"], 2)
    assert toy.digests(wanted) == undisturbed


@pytest.mark.parametrize(
    ("knobs", "retry"),
    [
        ({"kill_at": 3}, {"attempts": 0}),
        ({"refuse_at": 3}, {"attempts": 2}),
        ({"crash_at": 3}, {"attempts": 2}),
        ({"exit_at": 3}, {"attempts": 2}),
        ({"leave_at": 3, "leave_with": 9}, {"attempts": 2}),
        ({"signal_at": 3, "signal": int(signal.SIGSEGV)}, {"attempts": 2}),
    ],
)
def test_what_is_not_tried_again_fails_at_once(tmp_path, knobs, retry):
    outcome, attempts, told = carry_out(pipeline(tmp_path, knobs, retry={"wait_s": 0} | retry))
    assert (list(outcome.failed), attempts, told) == (["sft"], 1, [])


def test_a_crash_loop_ends_after_the_attempts_and_a_new_run_counts_anew(tmp_path):
    wanted = pipeline(tmp_path, {"kill_always_at": 3})
    outcome, attempts, told = carry_out(wanted)
    assert "was killed by SIGKILL" in outcome.failed["sft"]
    assert (attempts, len(told)) == (3, 2)
    assert carry_out(wanted)[1] == 6


def test_listed_exit_codes_are_tried_again(tmp_path):
    retry = {"attempts": 1, "wait_s": 0, "exit_codes": [9]}
    outcome, attempts, _ = carry_out(pipeline(tmp_path, {"leave_at": 3, "leave_with": 9}, retry=retry))
    assert (list(outcome.failed), attempts) == (["sft"], 2)


def test_a_stages_own_retry_comes_before_the_pipelines(tmp_path):
    stage = toy.sft(retry={"attempts": 0})
    wanted = toy.pipeline({"sft": stage}, knobs={"plain": {"kill_at": 3}}, folder=tmp_path, retry={"wait_s": 0})
    outcome, attempts, _ = carry_out(wanted)
    assert (list(outcome.failed), attempts) == (["sft"], 1)


def test_what_was_tried_again_is_one_curve(tmp_path):
    wanted = pipeline(tmp_path, {"kill_at": 1}, tracking={"enabled": True})
    outcome, attempts, _ = carry_out(wanted)
    assert (outcome.done, attempts) == (["sft"], 2)
    [curve] = curves(toy.stage(wanted, "sft"))
    assert [entry.ended.status for _, entry in curve] == ["KILLED", "FINISHED"]


def test_a_stage_whose_saved_state_is_gone_is_not_begun_anew_by_itself(tmp_path):
    class Loses(toy.Notes):
        def progress(self, stage, event):
            if len(toy.stage(wanted, "sft").attempts()) == 2:
                shutil.rmtree(toy.stage(wanted, "sft").state)

    wanted = pipeline(tmp_path, {"kill_always_at": 5})
    outcome = toy.run(wanted, reporter=Loses())
    assert "was killed by SIGKILL" in outcome.failed["sft"]
    assert len(toy.stage(wanted, "sft").attempts()) == 2


def test_where_nothing_more_is_started_nothing_is_tried_again(tmp_path):
    stages = {
        "sft": toy.sft(steps=6),
        "gated": toy.sft(task="slow", seed=1, gates=[{"metric": "loss", "max": -1, "action": "stop"}]),
    }
    knobs = {"plain": {"kill_at": 5}, "slow": {"sleep_ms": 200}}
    wanted = toy.pipeline(stages, knobs=knobs, folder=tmp_path, retry={"wait_s": 2})
    outcome = toy.run(wanted)
    assert list(outcome.failed) == ["gated"]
    assert outcome.not_run["sft"].startswith("gate of gated")
    assert len(toy.stage(wanted, "sft").attempts()) == 1
