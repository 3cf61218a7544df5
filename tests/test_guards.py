"""Guards around real workers: warned of, paused, stopped, and ended where they hang."""

import errno
import json
import os
import time

import pytest
import toy

from opdctl import runner
from opdctl.backends.contract import Event
from opdctl.backends.events import EventTail, EventWriter
from opdctl.errors import StageRefused
from opdctl.guards import Guards
from opdctl.plan import make_plan
from opdctl.store import StageDir, Workspace
from opdctl.verdicts import Outcome, Verdict, write_verdicts
from opdctl.watchdog import Alarm
from opdctl.watchdog.history import alarms_of, earlier_events, note_alarm

STILL = {"plain": {"sleep_ms": 10, "still_from": 3}}


def watched(folder, knobs, *, steps=12, stages=None, **watch):
    return toy.pipeline(stages or {"sft": toy.sft(steps=steps)}, knobs=knobs, folder=folder, watch=watch)


def alarms(wanted, name="sft"):
    return [alarm for _, alarm in alarms_of(toy.stage(wanted, name))]


def told(notes):
    return [text for (text,) in notes.of("message")]


@pytest.fixture
def undisturbed(tmp_path):
    wanted = toy.pipeline({"sft": toy.sft(steps=12)}, knobs={"plain": {}}, folder=tmp_path / "undisturbed")
    toy.run(wanted)
    return (toy.stage(wanted, "sft").checkpoint / "model.safetensors").read_bytes()


def weights(wanted):
    return (toy.stage(wanted, "sft").checkpoint / "model.safetensors").read_bytes()


def test_a_warning_is_told_and_left_beside_the_attempt_and_the_stage_goes_on(tmp_path):
    notes = toy.Notes()
    wanted = watched(tmp_path, STILL, zero_gradient={"steps": 2})
    assert toy.run(wanted, reporter=notes).done == ["sft"]
    [alarm] = alarms(wanted)
    assert (alarm.rule, alarm.action, alarm.step) == ("zero_gradient", "warn", 4)
    [text] = [text for text in told(notes) if "watchdog" in text]
    assert "sft: watchdog: zero_gradient at step 4: the gradient norm is 0" in text
    assert "likely: " in text
    assert "runbooks/entropy-collapse.md#zero-gradient" in text


def test_a_stage_may_say_otherwise_than_its_pipeline(tmp_path):
    own = {"zero_gradient": {"action": "off"}}
    stages = {"sft": toy.sft(steps=12, watch=own), "other": toy.sft(steps=12, seed=1)}
    wanted = watched(tmp_path, STILL, stages=stages, zero_gradient={"steps": 2})
    toy.run(wanted)
    assert (alarms(wanted), [alarm.step for alarm in alarms(wanted, "other")]) == ([], [4])


def test_a_healthy_stage_has_no_alarm(tmp_path):
    notes = toy.Notes()
    wanted = watched(tmp_path, {"plain": {"sleep_ms": 10}})
    toy.run(wanted, reporter=notes)
    assert (alarms(wanted), told(notes)) == ([], [])


def test_a_paused_stage_saves_and_the_next_run_goes_on_to_the_same_weights(tmp_path, undisturbed):
    notes = toy.Notes()
    stages = {"sft": toy.sft(steps=12), "after": toy.sft("stage:sft")}
    knobs = {"plain": {"sleep_ms": 30, "still_from": 3}}
    wanted = watched(tmp_path, knobs, stages=stages, zero_gradient={"steps": 2, "action": "pause"})
    first = toy.run(wanted, reporter=notes)
    assert first.failed == {}
    assert first.interrupted  # the command line says how to go on
    assert first.not_run["sft"].startswith("paused: watchdog: zero_gradient at step 4")
    assert first.not_run["after"] == "sft is paused"
    saved = toy.stage(wanted, "sft").state_step()
    assert saved >= 4
    [text] = [text for text in told(notes) if "paused, saved" in text]
    assert "stages.sft.watch.zero_gradient.action=warn" in text

    assert toy.run(wanted, reporter=notes).done == ["sft", "after"]
    resumed = EventTail(toy.stage(wanted, "sft").attempts()[1].events).read()
    assert resumed[0].step == saved + 1
    assert weights(wanted) == undisturbed


def test_a_stopped_stage_has_failed_with_the_evidence_and_is_not_tried_again_by_itself(tmp_path, undisturbed):
    notes = toy.Notes()
    knobs = {"plain": {"sleep_ms": 30, "nan_from": 4}}
    wanted = toy.pipeline({"sft": toy.sft(steps=12)}, knobs=knobs, folder=tmp_path, retry={"attempts": 2, "wait_s": 0})
    outcome = toy.run(wanted, reporter=notes)
    assert list(outcome.failed) == ["sft"]
    assert "not_finite at step 4: loss is nan (at step 3: loss 0." in outcome.failed["sft"]
    assert len(toy.stage(wanted, "sft").attempts()) == 1
    error = json.loads((toy.stage(wanted, "sft").attempts()[0].path / "error.json").read_text())
    assert "not_finite" in error["message"]
    assert "runbooks/diagnose-opd-divergence.md" in error["hint"]

    assert toy.run(wanted).done == ["sft"]
    assert weights(wanted) == undisturbed


def test_weights_of_a_stage_that_was_to_be_stopped_are_not_published_although_it_got_to_the_end(tmp_path):
    wanted = watched(tmp_path, {"plain": {"nan_from": 12}})
    outcome = toy.run(wanted)
    assert "not_finite at step 12" in outcome.failed["sft"]
    assert toy.stage(wanted, "sft").record() is None


def test_a_run_again_does_not_publish_what_was_stopped_at_the_last_step_unless_the_rule_only_warns(tmp_path):
    wanted = watched(tmp_path, {"plain": {"nan_from": 12}})
    toy.run(wanted)
    assert toy.stage(wanted, "sft").state_step() == 12  # no step is left that would tell
    assert "not_finite at step 12" in toy.run(wanted).failed["sft"]
    assert toy.stage(wanted, "sft").record() is None
    milder = watched(tmp_path, {"plain": {"nan_from": 12}}, not_finite={"action": "warn"})
    assert toy.run(milder).done == ["sft"]


def test_a_stage_that_is_being_paused_and_then_is_to_be_stopped_has_failed(tmp_path):
    knobs = {"plain": {"sleep_ms": 30, "still_from": 5, "nan_from": 6}}
    outcome = toy.run(watched(tmp_path, knobs, zero_gradient={"steps": 1, "action": "pause"}))
    assert "not_finite at step 6" in outcome.failed["sft"]


def test_a_stage_that_got_to_the_end_before_it_was_paused_is_done(tmp_path):
    notes = toy.Notes()
    wanted = watched(tmp_path, {"plain": {"still_from": 12}}, zero_gradient={"steps": 1, "action": "pause"})
    assert toy.run(wanted, reporter=notes).done == ["sft"]
    assert [alarm.rule for alarm in alarms(wanted)] == ["zero_gradient"]
    [text] = [text for text in told(notes) if "zero_gradient at step 12" in text]
    assert text.startswith("sft: watchdog: ")


def test_a_worker_that_fails_by_itself_while_it_is_paused_has_failed(tmp_path):
    knobs = {"plain": {"sleep_ms": 300, "still_from": 1, "refuse_late_at": 1}}
    wanted = watched(tmp_path, knobs, zero_gradient={"steps": 1, "action": "pause"})
    outcome = toy.run(wanted)
    assert "loss is nan at step 3" in outcome.failed["sft"]


@pytest.mark.parametrize("action", ["stop", "pause"])
def test_a_worker_that_hangs_is_ended_after_its_patience_and_goes_on_from_its_save(
    tmp_path, monkeypatch, undisturbed, action
):
    monkeypatch.setattr(runner, "PATIENCE_S", 0.3)
    knobs = {"plain": {"sleep_ms": 20, "hang_at": 5}}
    wanted = watched(tmp_path, knobs, no_progress={"least_s": 1.0, "times": 5, "action": action})
    began = time.monotonic()
    outcome = toy.run(wanted)
    assert time.monotonic() - began < 20
    text = outcome.failed["sft"] if action == "stop" else outcome.not_run["sft"]
    assert "no_progress at step 5: no event for 1 s after step 5 of 12" in text
    [attempt] = toy.stage(wanted, "sft").attempts()
    pid = json.loads(attempt.worker.read_text())["pid"]
    assert not os.path.exists(f"/proc/{pid}")

    assert toy.run(wanted).done == ["sft"]
    assert weights(wanted) == undisturbed


def test_other_stages_go_on_while_one_is_paused(tmp_path):
    stages = {"sft": toy.sft(steps=12), "other": toy.sft(task="well", seed=1, steps=4)}
    knobs = {"plain": {"sleep_ms": 30, "still_from": 1}, "well": {}}
    wanted = watched(tmp_path, knobs, stages=stages, zero_gradient={"steps": 1, "action": "pause"})
    outcome = toy.run(wanted)
    assert outcome.done == ["other"]
    assert list(outcome.not_run) == ["sft"]


def test_a_full_disk_pauses_what_runs(tmp_path):
    wanted = toy.pipeline(
        {"sft": toy.sft(steps=100)},
        knobs={"plain": {"sleep_ms": 30}},
        folder=tmp_path,
        disk={"reserve_gib": 1e9, "forecast": "off"},
    )
    outcome = toy.run(wanted)
    assert "disk.reserve_gib" in outcome.not_run["sft"]
    assert outcome.failed == {}


def test_nothing_more_is_started_on_a_full_disk(tmp_path):
    wanted = toy.pipeline(
        {"sft": toy.sft(steps=100), "other": toy.sft(seed=1)},
        knobs={"plain": {"sleep_ms": 30}},
        folder=tmp_path,
        machine={"slots": 1, "cpus": 1},
        disk={"reserve_gib": 1e9, "forecast": "off"},
    )
    outcome = toy.run(wanted)
    assert outcome.interrupted
    assert "nothing more is started" in outcome.not_run["other"]
    assert toy.stage(wanted, "other").attempts() == []


def test_a_disk_that_cannot_be_asked_ends_nothing(tmp_path, monkeypatch):
    def unanswered(path):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr("opdctl.guards.shutil.disk_usage", unanswered)
    wanted = toy.pipeline({"sft": toy.sft()}, folder=tmp_path, disk={"forecast": "off"})
    assert toy.run(wanted).done == ["sft"]


def test_time_in_which_nobody_watched_is_no_silence_of_a_stage(tmp_path, monkeypatch):
    monkeypatch.setattr("opdctl.guards.GAP_S", 0.1)
    wanted = watched(tmp_path, {"plain": {}}, no_progress={"least_s": 0.5, "start_s": 0.5})
    plan = make_plan(wanted, Workspace(tmp_path).run("r"))
    guards, [item] = Guards(plan), plan.stages
    guards.started(item, plan.run.stage("sft").new_attempt())
    assert guards.turn() == []
    time.sleep(0.7)  # this process was stopped
    assert guards.turn() == []
    deadline = time.monotonic() + 5
    while not (orders := guards.turn()) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert "no event for" in orders[0].text


def test_who_asked_is_told_of_a_refusal_before_anything_starts(tmp_path):
    file = tmp_path / "told.json"
    wanted = toy.pipeline(
        {"sft": toy.sft()},
        folder=tmp_path,
        disk={"reserve_gib": 1e9},
        notify={"command": ["sh", "-c", f"cat >> {file}"]},
    )
    with pytest.raises(StageRefused):
        toy.run(wanted)
    told = json.loads(file.read_text())
    assert (told["event"], told["stage"]) == ("refused", "")
    assert "disk.reserve_gib" in told["message"]


def test_who_asked_is_told_of_a_pause_a_failure_and_the_end(tmp_path):
    file = tmp_path / "told.jsonl"
    stages = {"sft": toy.sft(steps=12), "bad": toy.sft(task="bad", seed=1, steps=4)}
    knobs = {"plain": {"sleep_ms": 30, "still_from": 1}, "bad": {"refuse_at": 2}}
    wanted = toy.pipeline(
        stages,
        knobs=knobs,
        folder=tmp_path,
        watch={"zero_gradient": {"steps": 1, "action": "pause"}},
        notify={"command": ["sh", "-c", f"cat >> {file}; echo >> {file}"]},
    )
    toy.run(wanted)
    first = [json.loads(line) for line in file.read_text().splitlines()]
    assert {(one["event"], one["stage"], one["run"]) for one in first} == {
        ("stopped", "sft", "r"), ("failed", "bad", "r"), ("failed", "", "r"),
    }  # fmt: skip
    assert first[-1]["message"].startswith("0 done; bad failed; sft not run: paused: ")

    file.unlink()
    toy.run(wanted)
    assert [json.loads(line)["event"] for line in file.read_text().splitlines()] == ["finished"]


def test_a_refusal_of_the_gate_is_known_and_warnings_are_told_once(tmp_path):
    wanted = toy.pipeline({"sft": toy.sft()}, folder=tmp_path)
    plan = make_plan(wanted, Workspace(tmp_path).run("r"))
    guards, [item] = Guards(plan), plan.stages
    made = plan.run.stage("sft").new_attempt()
    guards.started(item, made)
    assert guards.turn() == []
    warned = Verdict("eos", "a -> b", Outcome.WARN, "two ids", "map them")
    refused = Verdict("grader", "task plain", Outcome.REFUSE, "always 0", "mend it")
    write_verdicts(made.gate, "key", [warned, refused])
    assert [order.text for order in guards.turn()] == ["gate: eos, a -> b (warn): two ids; map them"]
    assert (guards.turn(), guards.ended("sft"), guards.refused) == ([], [], {"sft"})


# ------------------------------------------------------------------------------------------- what earlier attempts saw


def attempt(stage: StageDir, steps, loss=0.0):
    made = stage.new_attempt()
    writer = EventWriter(made.events)
    for step in steps:
        writer.write(Event(step, 100, {"loss": loss}, "train", 1.0))
    return made


def test_a_resumed_attempt_is_told_the_events_of_its_curve_each_step_once(tmp_path):
    stage = StageDir(tmp_path / "runs" / "r" / "stages" / "sft", "sft")
    attempt(stage, range(1, 9), loss=1.0)  # another curve: the stage began anew
    attempt(stage, range(1, 8), loss=2.0)
    attempt(stage, [])  # died before a step
    attempt(stage, range(5, 11), loss=3.0)  # resumed from step 4
    now = stage.new_attempt()
    found = earlier_events(stage, now, resume_step=8)
    assert [(event.step, event.metrics["loss"]) for event in found] == [
        *((step, 2.0) for step in range(1, 5)),
        *((step, 3.0) for step in range(5, 9)),
    ]


def test_without_earlier_events_there_is_nothing_to_tell(tmp_path):
    stage = StageDir(tmp_path / "runs" / "r" / "stages" / "sft", "sft")
    assert list(earlier_events(stage, stage.new_attempt(), resume_step=3)) == []


def test_alarms_are_read_back_of_the_attempts_of_the_curve_and_damaged_lines_passed_over(tmp_path):
    stage = StageDir(tmp_path / "runs" / "r" / "stages" / "sft", "sft")
    first, second, third = (Alarm(name, "warn", 3, "e", ("c",), "r", {"x": 1.0}) for name in ("a", "b", "c"))
    note_alarm(attempt(stage, range(1, 9)), first)  # another curve
    note_alarm(begun := attempt(stage, range(1, 8)), second)
    with begun.alarms.open("a") as stream:
        stream.write('{"rule": "torn"\n[]\n')
    note_alarm(attempt(stage, range(5, 11)), third)
    assert alarms_of(stage) == [(2, second), (3, third)]
