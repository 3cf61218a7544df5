"""Ten bad inputs through the real command line: a message that names the thing, an exit code, and nothing lost.

A run is made first; afterwards its finished stages must still be what they were and be reused.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.xdist_group("bad-inputs")  # with --dist loadgroup one process makes the run for all of them

ROOT = Path(__file__).parent.parent
SMALL = {
    "axes.domain": "[general]",
    "axes.loss": "[full_vocab]",
    "scale.agents.sft.max_steps": "2",
    "scale.agents.opd.max_steps": "2",
    "scale.eval.prompts": "2",
    "tracking.enabled": "false",
}
OVERRIDES = ["scale=smoke", *(f"{key}={value}" for key, value in SMALL.items())]
MAX, STUDENT = "max[domain=general]", "mopd[loss=full_vocab]"


def opdctl(workspace, *arguments):
    """Exit code, stdout, stderr of a process of its own."""
    command = [sys.executable, "-m", "opdctl", *map(str, arguments), "--workspace", str(workspace)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=os.environ | {"COLUMNS": "200"})
    return done.returncode, done.stdout, done.stderr


def run(workspace, *more, name="r", only=()):
    picked = [part for stage in only for part in ("--only", stage)]
    return opdctl(workspace, "run", "kimi_k3", *OVERRIDES, "--run", name, *picked, *more)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A workspace in which every stage is finished."""
    workspace = tmp_path_factory.mktemp("finished")
    code, out, err = run(workspace)
    assert code == 0, out + err
    return workspace


@pytest.fixture
def workspace(finished, tmp_path):
    """A copy of it; times of change count, so they are kept."""
    copy = tmp_path / "workspace"
    shutil.copytree(finished, copy, symlinks=True)
    return copy


def weights(workspace):
    files = sorted(workspace.glob("runs/r/stages/**/checkpoint/model.safetensors"))
    return {str(file.relative_to(workspace)): file.read_bytes() for file in files}


@pytest.fixture
def nothing_lost(workspace):
    """Afterwards all that was finished is there and is reused."""
    before = weights(workspace)
    assert len(before) == 5
    yield
    assert weights(workspace) == before
    code, out, err = opdctl(workspace, "plan", "kimi_k3", *OVERRIDES, "--run", "r", "--json")
    assert code == 0, out + err
    assert {stage["decision"] for stage in json.loads(out)["stages"]} == {"reuse"}


@pytest.mark.usefixtures("nothing_lost")
@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("stages.sft.config.train.max_stepz=3", "stages.sft.config.train.max_stepz: unknown key (did you mean 'max_st"),
        (
            "stages.sft.config.train.max_steps=many",
            "stages.sft.config.train.max_steps: must be a whole number, not the",
        ),
        (f"stages.sft.inputs.init='stage:{MAX}'", "stages: they read each other in a circle: "),
        ("stages.sft.inputs.init='path:nowhere'", "stages.sft.inputs.init: no such folder: nowhere"),
        ("stages.mopd.config.data.tasks=[general,coding_agents]", "no teacher for domain=coding_agents, effort=low"),
    ],
    ids=["wrong-key", "wrong-type", "cycle", "missing-file", "unknown-route"],
)
def test_a_bad_configuration_is_refused_by_its_key(workspace, override, told):
    code, out, err = run(workspace, override)
    assert (code, out) == (2, "")
    assert told in err
    assert "Traceback" not in err


@pytest.mark.usefixtures("nothing_lost")
def test_a_teacher_with_another_vocabulary_is_refused_before_it_teaches(workspace):
    """Same size, two ids swapped."""
    teacher = workspace / "teacher"
    shutil.copytree(workspace / "runs/r/stages/sft/checkpoint", teacher)
    (teacher / "record.json").unlink()
    tokenizer = json.loads((teacher / "tokenizer.json").read_text())
    words = tokenizer["model"]["vocab"]
    first, second = list(words)[10:12]
    words[first], words[second] = words[second], words[first]
    (teacher / "tokenizer.json").write_text(json.dumps(tokenizer))
    other = '{ref: "path:teacher", route: {domain: general, effort: low}}'
    teachers = f'stages.mopd.inputs.teachers=["stage:max[*]","stage:high[*]",{other}]'
    code, _, err = run(workspace, teachers, name="other", only=[STUDENT])
    assert code == 1, err
    assert f"id 10 is '{first}' to student and '{second}' to teacher" in err
    assert "--accept vocabulary" in err
    assert not list(workspace.glob("runs/other/stages/mopd/*/attempts"))


@pytest.fixture
def mounted(tmp_path):
    """Mount a small file system, unmounted afterwards: mounted(folder, options)."""
    folders = []

    def mount(folder, options):
        folder.mkdir(exist_ok=True)
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True, text=True, check=False
        )
        if done.returncode:
            pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
        folders.append(folder)
        return folder

    yield mount
    for folder in folders:
        subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.usefixtures("nothing_lost")
def test_a_folder_that_cannot_be_written_is_refused_with_its_path(workspace):
    (workspace / "runs/blocked").touch()  # permissions do not bind root; a file in the folder's place does
    code, _, err = run(workspace, "seed=1", name="blocked")
    assert (code, "Traceback" in err) == (1, False), err
    assert str(workspace / "runs/blocked") in err


@pytest.mark.usefixtures("nothing_lost")
def test_a_read_only_file_system_is_refused_with_its_path(workspace, mounted, tmp_path):
    folder = mounted(tmp_path / "read-only", "ro,size=1m")
    code, _, err = run(folder, name="r")
    assert (code, "Traceback" in err) == (1, False), err
    assert str(folder) in err
    assert "read-only: choose another --workspace" in err


def test_a_full_disk_fails_the_stage_and_with_room_again_it_goes_on(finished, mounted, tmp_path):
    small = mounted(tmp_path / "small", "size=8m")
    unasked = ["disk.forecast=off", "disk.reserve_gib=0"]  # or it would not start
    code, out, err = run(small, *unasked, only=["sft"])
    assert code == 0, out + err
    ballast = small / "ballast"
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)):
            pass
    before = weights(small)
    code, out, err = run(small, *unasked, only=["sft", MAX])
    assert code == 1, out + err
    assert "disk" in err
    assert "full" in err
    assert "Traceback" not in err.split("failed:")[0]
    assert weights(small) == before
    ballast.unlink()
    code, out, err = run(small, *unasked, only=["sft", MAX])
    assert code == 0, out + err
    assert weights(small).items() <= weights(finished).items()


def test_a_corrupt_checkpoint_is_refused_by_name_and_can_be_made_again(workspace):
    file = workspace / "runs/r/stages/sft/checkpoint/model.safetensors"
    before = weights(workspace)
    content = bytearray(file.read_bytes())
    content[-100] ^= 0xFF
    file.write_bytes(content)
    code, _, err = run(workspace, "stages.mopd.config.train.max_steps=4")
    assert (code, "Traceback" in err) == (1, False), err
    assert "the checkpoint of stage 'sft' is corrupt" in err
    assert "model.safetensors has changed since it was published" in err
    assert "--rerun 'sft'" in err
    code, out, err = run(workspace, "--rerun", "sft", only=["sft"])
    assert code == 0, out + err
    assert weights(workspace) == before


@pytest.mark.usefixtures("nothing_lost")
def test_a_second_run_of_the_same_name_is_refused_with_the_first_ones_process(workspace):
    slow = [*OVERRIDES, "stages.sft.config.train.max_steps=100000", "--run", "busy", "--only", "sft"]
    command = [sys.executable, "-m", "opdctl", "run", "kimi_k3", *slow, "--workspace", str(workspace)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as first:
        try:
            lock = workspace / "runs/busy/.lock"
            deadline = time.monotonic() + 60
            while not (lock.exists() and lock.stat().st_size):
                assert time.monotonic() < deadline
                time.sleep(0.05)
            code, _, err = run(workspace, name="busy", only=["sft"])
            assert code == 1, err
            assert f"run 'busy' is in use by process {first.pid} on " in err
            assert f"kill {first.pid}" in err
            assert first.poll() is None
        finally:
            first.send_signal(signal.SIGTERM)
        assert first.wait(timeout=60) == 130
