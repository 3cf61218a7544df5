"""A stage on verl as opdctl sees it: a process that is started, watched, ended, and whose last save is published."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from multiprocessing import shared_memory
from pathlib import Path

import pytest
import torch
import toy
from backends.verl import standin
from engine.stages import Recorder
from safetensors.torch import load_file, save_file

from opdctl import processes
from opdctl.backends.contract import Stopped
from opdctl.backends.verl.checkpoints import saves_of
from opdctl.backends.verl.layout import layout
from opdctl.engine.checkpoint import load_policy
from opdctl.errors import OpdctlError, ProgramDied, StageFailed, StageRefused
from opdctl.lock import worker_lives


def test_every_step_is_an_event_and_the_last_save_is_published(tmp_path, monkeypatch):
    given, control = standin.spec(tmp_path), Recorder()
    result = standin.run(monkeypatch, given, control)
    assert [step for step, _ in control.events] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert control.events[3][1] == {"loss": 0.25, "verl/train/mfu": 0.5}
    assert (result.step, result.metrics) == (8, {"loss": 0.125})
    policy = load_policy(given.output)
    expected = load_policy(layout(given).new_model).state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in policy.state_dict().items())


def test_steps_of_rl_are_counted_in_optimizer_steps(tmp_path, monkeypatch):
    given, control = standin.spec(tmp_path, "rlvr", train={"global_batch_size": 32}), Recorder()
    assert standin.run(monkeypatch, given, control).step == 8
    assert [step for step, _ in control.events] == [2, 4, 6, 8]
    assert json.loads((tmp_path / "state" / "step.json").read_text())["step"] == 8


def test_weights_are_published_in_the_declared_precision(tmp_path, monkeypatch):
    given = standin.spec(tmp_path, train={"precision": "bfloat16"})
    standin.run(monkeypatch, given)
    assert {tensor.dtype for tensor in load_file(Path(given.output) / "model.safetensors").values()} == {torch.bfloat16}


def test_weights_that_are_not_finite_are_not_published(tmp_path, monkeypatch):
    given = standin.spec(tmp_path)
    standin.run(monkeypatch, given)
    weights = layout(given).checkpoints / "global_step_8" / "huggingface" / "model.safetensors"
    tensors = load_file(weights)
    tensors["model.norm.weight"][0] = torch.nan
    save_file(tensors, weights)
    with pytest.raises(OpdctlError, match=r"NaN or infinite: model\.norm\.weight"):
        standin.run(monkeypatch, standin.spec(tmp_path, attempt=2))


def test_weights_are_not_rounded_by_verls_merger_unless_that_is_the_precision(tmp_path, monkeypatch):
    given = standin.spec(tmp_path)
    standin.run(monkeypatch, given)
    (layout(given).checkpoints / "global_step_8" / "huggingface" / "model.safetensors").unlink()
    with pytest.raises(StageFailed, match="no weights in Hugging Face format, .* would round them to bfloat16"):
        standin.run(monkeypatch, standin.spec(tmp_path, attempt=2))


def test_exit_code_0_without_a_new_step_is_a_failure(tmp_path, monkeypatch):
    with pytest.raises(StageFailed, match="exit code 0 without one new step: 0 of 8 steps"):
        standin.run(monkeypatch, standin.spec(tmp_path), exit_at=0)


def test_exit_code_0_before_the_last_step_is_a_failure(tmp_path, monkeypatch):
    with pytest.raises(StageFailed, match="exit code 0 after step 5: 4 of 8 steps are saved"):
        standin.run(monkeypatch, standin.spec(tmp_path), exit_at=5)


def test_a_trainer_that_failed_is_told_with_its_exit_code_and_step(tmp_path, monkeypatch):
    with pytest.raises(StageFailed, match="verl ended with exit code 7 after step 3"):
        standin.run(monkeypatch, standin.spec(tmp_path), exit_at=3, code=7)


@pytest.mark.parametrize("knobs", [{"last_code": 134}, {"linger_s": 600}])
def test_a_trainer_that_saved_its_last_step_has_done_its_work_however_it_ends(tmp_path, monkeypatch, knobs):
    monkeypatch.setattr("opdctl.backends.verl.stage.END_S", 1.0)
    given = standin.spec(tmp_path)
    assert standin.run(monkeypatch, given, **knobs).step == 8
    load_policy(given.output)


def test_a_stage_with_nothing_left_to_do_publishes_without_starting_verl(tmp_path, monkeypatch):
    standin.run(monkeypatch, standin.spec(tmp_path))
    again, control = standin.spec(tmp_path, attempt=2), Recorder()
    (tmp_path / "python").unlink()
    result = standin.run(monkeypatch, again, control)
    assert (result.step, result.metrics, control.events) == (8, {"loss": 0.125}, [])
    load_policy(again.output)


# ------------------------------------------------------------------------------------------------------ resuming


def interrupted(tmp_path, monkeypatch) -> None:
    """An attempt that failed at step 5 and saved steps 2 and 4, of which 4 is kept and 2 is put back."""
    with pytest.raises(StageFailed):
        standin.run(monkeypatch, standin.spec(tmp_path), exit_at=5, code=1)


def test_a_failed_stage_goes_on_from_its_newest_save(tmp_path, monkeypatch):
    interrupted(tmp_path, monkeypatch)
    control = Recorder()
    standin.run(monkeypatch, standin.spec(tmp_path, attempt=2), control)
    assert [step for step, _ in control.events] == [5, 6, 7, 8]


def test_a_save_cut_short_by_a_kill_is_not_resumed_from(tmp_path, monkeypatch):
    with pytest.raises(ProgramDied, match="killed by SIGKILL after step 3"):  # which is tried again
        standin.run(monkeypatch, standin.spec(tmp_path), torn_at=4)
    checkpoints = tmp_path / "state" / "checkpoints"
    assert (checkpoints / "latest_checkpointed_iteration.txt").read_text() == ""
    assert (checkpoints / "global_step_4").exists()
    control = Recorder()
    standin.run(monkeypatch, standin.spec(tmp_path, attempt=2), control)
    assert [step for step, _ in control.events] == [3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize("content", [None, "", "x", "0", "6", "44"])
def test_a_latest_file_that_is_missing_torn_or_wrong_is_written_again(tmp_path, monkeypatch, content):
    interrupted(tmp_path, monkeypatch)
    latest = tmp_path / "state" / "checkpoints" / "latest_checkpointed_iteration.txt"
    latest.unlink() if content is None else latest.write_text(content)
    control = Recorder()
    standin.run(monkeypatch, standin.spec(tmp_path, attempt=2), control)
    assert control.events[0][0] == 5


@pytest.mark.parametrize(
    "damage",
    [
        "model_world_size_1_rank_0.pt",
        "optim_world_size_1_rank_0.pt",
        "extra_state_world_size_1_rank_0.pt",
        "data_0.pt",
    ],
)
def test_a_save_with_a_file_cut_short_is_not_whole(tmp_path, monkeypatch, damage):
    interrupted(tmp_path, monkeypatch)
    save = tmp_path / "state" / "checkpoints" / "global_step_4"
    saves = saves_of(standin.spec(tmp_path), 1)
    assert saves.whole() == [4]
    (save / damage).write_bytes((save / damage).read_bytes()[:-10])
    assert saves.whole() == []


def test_saves_that_are_gone_are_no_silent_start_from_nothing(tmp_path, monkeypatch):
    interrupted(tmp_path, monkeypatch)
    shutil.rmtree(tmp_path / "state" / "checkpoints" / "global_step_4")
    with pytest.raises(StageRefused, match="step 4 was saved, and the newest whole save .* none at all"):
        standin.run(monkeypatch, standin.spec(tmp_path, attempt=2))


@pytest.mark.parametrize("knobs", [{"forgets": 1}, {"forgets": 1, "silent": 1}])
def test_a_trainer_that_starts_again_from_nothing_is_a_failure(tmp_path, monkeypatch, knobs):
    interrupted(tmp_path, monkeypatch)
    control = Recorder()
    with pytest.raises(StageFailed, match="should have gone on from step 4, and (goes on from step 0|reported step 1)"):
        standin.run(monkeypatch, standin.spec(tmp_path, attempt=2), control, sleep_s=0.2, **knobs)
    assert control.events == []
    assert 4 in saves_of(standin.spec(tmp_path), 1).whole()


def test_a_state_saved_by_another_number_of_processes_is_refused(tmp_path, monkeypatch):
    interrupted(tmp_path, monkeypatch)
    given = standin.spec(tmp_path, attempt=2, verl={"gpus_per_node": 2})
    with pytest.raises(StageRefused, match="saved by 1 processes, and resources.verl gives 2"):
        standin.run(monkeypatch, given)


@pytest.mark.parametrize(("keep", "kept"), [(1, [8]), (3, [4, 6, 8])])
def test_the_last_saves_are_kept_across_attempts(tmp_path, monkeypatch, keep, kept):
    with pytest.raises(StageFailed):
        standin.run(monkeypatch, standin.spec(tmp_path, verl={"keep_last": keep}), exit_at=5, code=1)
    given = standin.spec(tmp_path, attempt=2, verl={"keep_last": keep})
    standin.run(monkeypatch, given, sleep_s=0.6)  # so that each save is seen
    assert saves_of(given, 1).whole() == kept


# --------------------------------------------------------------------------------------------- hanging and ending


def test_a_trainer_that_hangs_is_ended_with_the_stacks_of_its_processes(tmp_path, monkeypatch):
    given = standin.spec(tmp_path, workers={"stall_timeout_s": 6.0})
    with pytest.raises(StageFailed, match=r"verl hangs after step \d: no event, .* for \d+ s") as caught:
        standin.run(monkeypatch, given, hang_at=3)
    assert "stacks" in caught.value.hint
    assert standin.left(tmp_path) == []


def test_a_stop_ends_the_trainer_and_its_daemons_and_goes_on_from_the_last_save(tmp_path, monkeypatch):
    with pytest.raises(Stopped):
        standin.run(monkeypatch, standin.spec(tmp_path), Recorder(stop_at=3), sleep_s=0.3, daemon=1)
    assert standin.left(tmp_path) == []
    saved = json.loads((tmp_path / "state" / "step.json").read_text())["step"]
    control = Recorder()
    standin.run(monkeypatch, standin.spec(tmp_path, attempt=2), control)
    assert [step for step, _ in control.events] == list(range(saved + 1, 9))


def test_shared_memory_and_temporary_files_of_a_stage_are_removed_and_no_other(tmp_path, monkeypatch):
    foreign = shared_memory.SharedMemory(create=True, size=64)
    try:
        given = standin.spec(tmp_path)
        standin.run(monkeypatch, given, sleep_s=0.3, daemon=1)
        segment = (Path(given.events).parent / "daemon").read_text()
        assert not (Path("/dev/shm") / segment.lstrip("/")).exists()
        assert (Path("/dev/shm") / foreign.name.lstrip("/")).exists()
        assert not (Path(given.events).parent / "processes.json").exists()
    finally:
        foreign.close()
        foreign.unlink()


def test_a_stage_whose_ray_has_lost_its_head_ends_soon(tmp_path, monkeypatch):
    monkeypatch.setattr("opdctl.backends.verl.stage.HEAD_S", 1.0)
    monkeypatch.setattr("opdctl.backends.verl.watch.LOOK_S", 0.2)
    given = standin.spec(tmp_path)

    class Killer(Recorder):
        def emit(self, step, total, metrics, phase="train"):
            super().emit(step, total, metrics, phase)
            for pid in processes.find(Path(given.events).parent):
                if step == 2 and processes.command_of(pid) == "gcs_server":
                    os.kill(pid, signal.SIGKILL)

    with pytest.raises(StageFailed, match=r"Ray's gcs_server ended after step \d"):
        standin.run(monkeypatch, given, Killer(), sleep_s=1.0, head=1)
    assert standin.left(tmp_path) == []


def test_a_failure_that_the_plug_in_tells_of_ends_the_stage(tmp_path, monkeypatch):
    given = standin.spec(tmp_path)

    class Telling(Recorder):
        def emit(self, step, total, metrics, phase="train"):
            super().emit(step, total, metrics, phase)
            layout(given).failure.write_text(json.dumps({"message": "the verifier fell over", "hint": "mend it"}))

    with pytest.raises(StageFailed, match="the verifier fell over"):
        standin.run(monkeypatch, given, Telling(), sleep_s=0.3)


def test_a_stage_ends_once_its_gpus_have_the_memory_back_that_it_found(tmp_path, monkeypatch):
    told = tmp_path / "told"  # a line for each time that nvidia-smi is asked; it then forgets the line
    told.write_text("1000 500\n79000 500\n30000 500\n1100 500\n0 0\n")
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\nhead -1 {told} | tr ' ' '\\n'\nsed -i 1d {told}\necho $@ >> {tmp_path}/asked\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    standin.run(monkeypatch, replace(standin.spec(tmp_path), devices=[2, 3]))
    assert told.read_text() == "0 0\n"
    assert (tmp_path / "asked").read_text().splitlines()[0].endswith("-i 2,3")


# ---------------------------------------------------------------------------------------------- kills from outside


def started(workspace: Path, monkeypatch, **knobs) -> subprocess.Popen:
    """An orchestrator whose stage has saved step 2 and goes on slowly."""
    monkeypatch.setenv("STANDIN", json.dumps({"sleep_s": 1.0, "daemon": 1} | knobs))
    path = os.pathsep.join([str(toy.FOLDER), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [sys.executable, standin.__file__, workspace], env={**os.environ, "PYTHONPATH": path}, text=True
    )
    pointer = workspace / "runs/r/stages/sft/state/step.json"
    wait(lambda: pointer.exists() and process.poll() is None, 120)
    return process


def wait(condition, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def worker(workspace: Path) -> int:
    [note] = workspace.glob("runs/r/stages/sft/attempts/*/worker.json")
    assert worker_lives(note)
    return int(json.loads(note.read_text())["pid"])


def resumed(workspace: Path, monkeypatch) -> toy.Notes:
    monkeypatch.setenv("STANDIN", "{}")
    notes = toy.Notes()
    assert standin.execute_in(workspace, notes=notes).done == ["sft"]
    assert notes.of("progress")[0] == ("sft", 3)
    return notes


@pytest.mark.parametrize("victims", ["worker", "both"])
def test_nothing_of_a_killed_stage_is_left_and_the_next_run_goes_on_from_its_save(workspace, monkeypatch, victims):
    with started(workspace, monkeypatch) as process:
        for pid in (worker(workspace), *([process.pid] if victims == "both" else [])):
            os.kill(pid, signal.SIGKILL)
        wait(lambda: not standin.left(workspace), 30)
    segment = next(workspace.glob("runs/r/stages/sft/attempts/1/daemon")).read_text()
    wait(lambda: not (Path("/dev/shm") / segment.lstrip("/")).exists(), 5)
    resumed(workspace, monkeypatch)


def test_what_a_killed_watcher_left_is_named_and_ended_by_the_next_run(workspace, monkeypatch):
    with started(workspace, monkeypatch) as process:
        watchers = [
            int(path.name)
            for path in Path("/proc").iterdir()
            if path.name.isdigit() and _arguments(path)[-1:] == [str(workspace / "runs/r/stages/sft/attempts/1")]
        ]
        assert len(watchers) == 1
        for pid in (*watchers, worker(workspace), process.pid):
            os.kill(pid, signal.SIGKILL)
    left = standin.left(workspace)
    assert left
    notes = resumed(workspace, monkeypatch)
    [told] = [text for (text,) in notes.of("message") if "left running" in text]
    assert all(str(pid) in told for pid in left)
    assert standin.left(workspace) == []


def _arguments(process: Path) -> list[str]:
    try:
        return (process / "cmdline").read_text().rstrip("\0").split("\0")
    except OSError:
        return []


def test_an_input_of_its_own_keeps_its_chat_template(tmp_path, monkeypatch):
    made = standin.spec(tmp_path / "a")
    standin.run(monkeypatch, made)
    start = tmp_path / "start"
    shutil.copytree(made.output, start)
    (start / "chat_template.jinja").write_text("{{ messages[0].content }}")
    given = standin.spec(tmp_path / "b")
    given = replace(given, inputs=[replace(given.inputs[0], path=str(start))])
    standin.run(monkeypatch, given)
    assert (Path(given.output) / "chat_template.jinja").read_text() == "{{ messages[0].content }}"
