import json
import os
import signal
import time

import pytest
import toy

from opdctl.errors import ConfigError, StageRefused


def test_every_stage_runs_after_what_it_reads_and_is_reused_the_next_time(workspace):
    stages = {"sft": toy.sft(), "a": toy.sft("stage:sft", lr=0.2), "eval": toy.evaluation("stage:sft", "stage:a")}
    wanted = toy.pipeline(stages)
    assert toy.run(wanted).done == ["sft", "a", "eval"]
    before, notes = toy.digests(wanted), toy.Notes()
    assert toy.run(wanted, reporter=notes).done == ["sft", "a", "eval"]
    assert [stage for stage, _ in notes.of("reused")] == ["sft", "a", "eval"]
    assert not notes.of("started")
    assert toy.digests(wanted) == before


def test_a_record_names_the_records_of_the_parents_it_was_made_from(workspace):
    wanted = toy.pipeline({"sft": toy.sft(), "a": toy.sft("stage:sft")})
    toy.run(wanted)
    parent = toy.stage(wanted, "sft").record()
    assert toy.stage(wanted, "a").record().parent_ids() == [parent.id]


def test_independent_stages_run_at_the_same_time(workspace):
    stages = {"a": toy.sft(task="slow"), "b": toy.sft(task="slow", lr=0.2)}
    notes = toy.Notes()
    toy.run(toy.pipeline(stages, knobs={"slow": {"sleep_ms": 100}}), reporter=notes)
    kinds = [call[0] for call in notes.calls if call[0] in ("started", "finished")]
    assert kinds == ["started", "started", "finished", "finished"]


def test_stages_that_need_the_whole_machine_run_alone(workspace):
    stages = {name: toy.sft(lr=lr, resources={"cpus": 2}) for name, lr in (("a", 0.1), ("b", 0.2))}
    notes = toy.Notes()
    toy.run(toy.pipeline(stages), reporter=notes)
    kinds = [call[0] for call in notes.calls if call[0] in ("started", "finished")]
    assert kinds == ["started", "finished", "started", "finished"]


def test_a_worker_gets_its_threads_and_sees_its_leased_gpus_only(workspace, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    stages = {
        name: toy.sft(lr=lr, task="slow", resources={"cpus": 1, "gpus": gpus})
        for name, lr, gpus in (("a", 0.1, 1), ("b", 0.2, 1), ("c", 0.3, 0))
    }
    machine = {"slots": 3, "cpus": 3, "gpus": 2}
    wanted = toy.pipeline(stages, machine=machine, knobs={"slow": {"sleep_ms": 50}})
    toy.run(wanted)
    logs = {name: toy.stage(wanted, name).attempts()[0].log.read_text().splitlines()[0] for name in stages}
    assert logs == {"a": "threads 1 devices '0'", "b": "threads 1 devices '1'", "c": "threads 1 devices ''"}


def test_a_failed_stage_stops_its_dependants_and_no_other(workspace):
    stages = {
        "bad": toy.sft(task="crash"),
        "child": toy.sft("stage:bad"),
        "grandchild": toy.sft("stage:child"),
        "good": toy.sft(lr=0.2),
    }
    notes = toy.Notes()
    outcome = toy.run(toy.pipeline(stages, knobs={"crash": {"crash_at": 2}}), reporter=notes)
    assert outcome.done == ["good"]
    assert outcome.not_run == {"child": "bad failed", "grandchild": "bad failed"}
    assert list(outcome.failed) == ["bad"]
    assert ("child: not run, because bad failed",) in notes.of("message")
    [(stage, message, tail)] = notes.of("failed")
    assert (stage, "ZeroDivisionError: a bug in the backend" in message) == ("bad", True)
    assert "Traceback" in tail


@pytest.mark.parametrize(
    ("knob", "told"),
    [
        ({"refuse_at": 2}, ["loss is nan at step 3", "lower the learning rate"]),
        ({"kill_at": 2}, ["SIGKILL", "out of memory"]),
        ({"exit_at": 2}, ["exit code 0", "left no result"]),
        ({"short_by": 1}, ["exit code 0", "3 of 4 steps"]),
        ({"no_weights": 1}, ["published no config.json", "*.safetensors"]),
    ],
)
def test_a_worker_without_the_result_it_owes_has_failed(workspace, knob, told):
    wanted = toy.pipeline({"sft": toy.sft(task="odd")}, knobs={"odd": knob})
    outcome = toy.run(wanted)
    assert outcome.done == []
    for text in told:
        assert text in outcome.failed["sft"]
    assert toy.stage(wanted, "sft").record() is None


def test_a_refusal_comes_without_a_traceback(workspace):
    notes = toy.Notes()
    wanted = toy.pipeline({"sft": toy.sft(task="odd")}, knobs={"odd": {"refuse_at": 2}})
    toy.run(wanted, reporter=notes)
    [(_, message, tail)] = notes.of("failed")
    assert "loss is nan at step 3" in message
    assert "Traceback" not in tail
    assert "Traceback" not in toy.stage(wanted, "sft").attempts()[-1].log.read_text()


def test_an_evaluation_without_a_report_has_failed(workspace):
    wanted = toy.pipeline(
        {"sft": toy.sft(), "eval": toy.evaluation("stage:sft", task="bare")}, knobs={"bare": {"no_weights": 1}}
    )
    assert "report.json" in toy.run(wanted).failed["eval"]


def test_a_failed_stage_goes_on_from_its_last_save(workspace, tmp_path):
    wanted = toy.pipeline({"sft": toy.sft(steps=6, task="faulty")}, knobs={"faulty": {"crash_at": 5}})
    assert "ZeroDivisionError" in toy.run(wanted).failed["sft"]
    assert toy.stage(wanted, "sft").state_step() == 4
    notes = toy.Notes()
    toy.run(wanted, reporter=notes)
    assert notes.of("started") == [("sft", 2)]
    assert [step for _, step in notes.of("progress")] == [5, 6]
    undisturbed = toy.pipeline({"sft": toy.sft(steps=6)}, folder=tmp_path)
    toy.run(undisturbed)
    assert toy.digests(wanted) == toy.digests(undisturbed)


def test_a_resumed_stage_that_silently_starts_from_nothing_has_failed(workspace):
    knobs = {"odd": {"crash_at": 3, "forgetful": 1, "sleep_ms": 50}}
    wanted = toy.pipeline({"sft": toy.sft(steps=40, task="odd")}, knobs=knobs)
    toy.run(wanted)
    assert toy.stage(wanted, "sft").state_step() == 2
    outcome = toy.run(wanted)
    assert "should have gone on from step 2, and reported step 1" in outcome.failed["sft"]
    assert toy.stage(wanted, "sft").record() is None


class Interrupting(toy.Notes):
    """Asks to stop, as Ctrl-C does, when a stage has reported its second step."""

    def __init__(self, times=1):
        super().__init__()
        self.left = times

    def progress(self, stage, event):
        super().progress(stage, event)
        while event.step >= 2 and self.left:
            self.left -= 1
            os.kill(os.getpid(), signal.SIGINT)


def test_the_first_interrupt_saves_and_the_next_run_ends_as_if_undisturbed(workspace, tmp_path):
    stages = {"sft": toy.sft(steps=12, task="slow"), "a": toy.sft("stage:sft")}
    wanted = toy.pipeline(stages, knobs={"slow": {"sleep_ms": 150}})
    outcome = toy.run(wanted, reporter=Interrupting())
    assert outcome.interrupted
    assert outcome.not_run == {"sft": "interrupted", "a": "interrupted"}
    assert not outcome.failed
    assert 2 <= toy.stage(wanted, "sft").state_step() < 12
    assert toy.run(wanted).done == ["sft", "a"]
    undisturbed = toy.pipeline(stages, knobs={"slow": {"sleep_ms": 1}}, folder=tmp_path)
    toy.run(undisturbed)
    assert toy.digests(wanted) == toy.digests(undisturbed)


def test_a_stage_that_finishes_while_the_run_is_interrupted_is_published(workspace):
    wanted = toy.pipeline({"sft": toy.sft(steps=2), "a": toy.sft("stage:sft")})
    outcome = toy.run(wanted, reporter=Interrupting())
    assert (outcome.done, outcome.not_run) == (["sft"], {"a": "interrupted"})


def test_the_second_interrupt_kills(workspace):
    wanted = toy.pipeline({"sft": toy.sft(steps=600, task="slow")}, knobs={"slow": {"sleep_ms": 200}})
    outcome = toy.run(wanted, reporter=Interrupting(times=2))
    assert outcome.interrupted
    assert not outcome.failed
    events = toy.stage(wanted, "sft").attempts()[0].events.read_text().splitlines()
    assert len(events) < 600


def test_nothing_that_a_worker_started_outlives_it(workspace):
    wanted = toy.pipeline({"sft": toy.sft(task="parent")}, knobs={"parent": {"child_at": 1}})
    assert toy.run(wanted).done == ["sft"]
    pid = int((toy.stage(wanted, "sft").attempts()[0].path / "child.pid").read_text())
    deadline = time.monotonic() + 5
    while _runs(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not _runs(pid)


def _runs(pid):
    try:
        with open(f"/proc/{pid}/stat") as stream:
            return stream.read().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def test_a_corrupt_checkpoint_is_refused_by_name_before_anything_starts(workspace):
    wanted = toy.pipeline({"sft": toy.sft()})
    toy.run(wanted)
    weights = toy.stage(wanted, "sft").checkpoint / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    both = toy.pipeline({"sft": toy.sft(), "a": toy.sft("stage:sft")})
    with pytest.raises(StageRefused, match=r"'sft' is corrupt.*model\.safetensors"):
        toy.run(both)
    assert not toy.stage(both, "a").attempts()


def test_all_stages_that_may_not_run_here_are_named_before_anything_starts(workspace):
    stages = {"good": toy.sft(), "bad": toy.sft(task="unfit"), "worse": toy.sft("stage:bad", task="unfit")}
    wanted = toy.pipeline(stages, knobs={"unfit": {"unfit": 1}})
    with pytest.raises(ConfigError) as error:
        toy.run(wanted)
    assert [problem.partition(":")[0] for problem in error.value.problems] == ["stages.bad", "stages.worse"]
    assert not toy.stage(wanted, "good").attempts()


def test_a_checkpoint_of_another_run_is_put_in_force_by_reference(workspace):
    wanted = toy.pipeline({"sft": toy.sft(), "a": toy.sft("stage:sft")})
    toy.run(wanted, "first")
    notes = toy.Notes()
    toy.run(wanted, "second", reporter=notes)
    assert not notes.of("started")
    assert toy.stage(wanted, "a", "second").checkpoint == toy.stage(wanted, "a", "first").checkpoint


def test_a_new_run_that_finds_everything_finished_says_what_it_is(workspace):
    wanted = toy.pipeline({"sft": toy.sft(), "a": toy.sft("stage:sft")})
    toy.run(wanted, "first")
    assert toy.run(wanted, "second").done == ["sft", "a"]
    second = toy.stage(wanted, "sft", "second").path.parent.parent
    assert list(json.loads((second / "pipeline.yaml").read_text())["stages"]) == ["sft", "a"]
    assert json.loads((second / "run.json").read_text())["name"] == "second"


def test_a_run_in_which_nothing_changed_is_not_written_to(workspace):
    wanted = toy.pipeline({"sft": toy.sft()})
    toy.run(wanted)
    info = toy.stage(wanted, "sft").path.parent.parent / "run.json"
    before = info.stat().st_mtime_ns
    toy.run(wanted)
    assert info.stat().st_mtime_ns == before


@pytest.mark.parametrize("knob", ["crash_at", "kill_at", "exit_at", "refuse_at"])
def test_why_an_attempt_failed_is_left_beside_its_log(workspace, knob):
    wanted = toy.pipeline({"sft": toy.sft(task="odd")}, knobs={"odd": {knob: 3}})
    told = toy.run(wanted).failed["sft"]
    [attempt] = toy.stage(wanted, "sft").attempts()
    assert told.startswith(json.loads((attempt.path / "error.json").read_text())["message"])


def test_the_run_says_who_started_it_and_what(workspace):
    wanted = toy.pipeline({"sft": toy.sft()})
    toy.run(wanted)
    run = toy.stage(wanted, "sft").path.parent.parent
    info = json.loads((run / "run.json").read_text())
    assert info["pipeline"] == "toy"
    assert {"argv", "user", "created", "opdctl_version"} <= info.keys()
    assert json.loads((run / "pipeline.yaml").read_text())["stages"]["sft"]["config"]["train"]["max_steps"] == 4
