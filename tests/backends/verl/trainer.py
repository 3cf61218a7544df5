"""Stands in for verl's interpreter: reads verl's overrides, writes its JSONL, its log lines and its saves, and
misbehaves as the variable STANDIN (JSON) says. Trains nothing: the weights of a save are those it began from.
"""

import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

DAEMON = """
import sys, time
from multiprocessing import resource_tracker, shared_memory
from pathlib import Path
segment = shared_memory.SharedMemory(create=True, size=4096)
resource_tracker.unregister(segment._name, "shared_memory")
Path(sys.argv[1]).write_text(segment.name)
time.sleep(600)
"""


def main():
    options = dict(word.lstrip("+").split("=", 1) for word in sys.argv if "=" in word)
    knobs = json.loads(os.environ.get("STANDIN", "{}"))
    kind = "sft" if "verl.trainer.sft_trainer" in sys.argv else "rl"
    folder = Path(options["trainer.default_local_dir"])
    model = Path(options["model.path" if kind == "sft" else "actor_rollout_ref.model.path"])
    total, every = int(options["trainer.total_training_steps"]), int(options["trainer.save_freq"])
    step = _start(folder, knobs)
    if "daemon" in knobs:
        _daemon()
    if "head" in knobs:
        _head()
    reports = os.open(os.environ["VERL_FILE_LOGGER_PATH"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    while step < total:
        time.sleep(knobs.get("sleep_s", 0))
        if knobs.get("exit_at") == step:
            sys.exit(knobs.get("code", 0))
        if knobs.get("hang_at") == step:
            time.sleep(600)
        step += 1
        if step % every == 0 or step == total:
            _save(folder, step, kind, model, torn=knobs.get("torn_at") == step)
        data = {"train/loss": 1 / step, "train/mfu": 0.5} if kind == "sft" else {"training/global_step": step}
        os.write(reports, json.dumps({"step": step, "data": data}).encode() + b"\n")
    time.sleep(knobs.get("linger_s", 0))
    sys.exit(knobs.get("last_code", 0))


def _start(folder, knobs):
    latest = folder / "latest_checkpointed_iteration.txt"
    if knobs.get("forgets") or not latest.exists():
        if "silent" not in knobs:
            print(f"Checkpoint tracker file does not exist: {latest}", flush=True)
        return 0
    step = int(latest.read_text())
    print(f"Found latest checkpoint: {folder}/global_step_{step} (step {step})", flush=True)
    return step


def _daemon():
    """As Ray's: in a session of its own, and it outlives whoever started it."""
    name = Path(os.environ["OPDCTL_ATTEMPT"]) / "daemon"
    subprocess.Popen([sys.executable, "-c", DAEMON, name], start_new_session=True)
    while not (name.exists() and name.read_text()):
        time.sleep(0.01)


def _head():
    """A process that is called like Ray's."""
    program = Path(os.environ["TMPDIR"]) / "gcs_server"
    program.symlink_to(shutil.which("sleep"))
    subprocess.Popen([program, "600"], start_new_session=True)


def _save(folder, step, kind, model, torn):
    save = folder / f"global_step_{step}"
    engine = save if kind == "sft" else save / "actor"
    (engine / "huggingface").mkdir(parents=True, exist_ok=True)
    for what in ("model", "optim", "extra_state"):
        _zip(engine / f"{what}_world_size_1_rank_0.pt")
    (engine / "fsdp_config.json").write_text('{"FSDP_version": 2, "world_size": 1}')
    for name in ("config.json", "model.safetensors"):
        shutil.copy(model / name, engine / "huggingface" / name)
    (engine / "huggingface" / "chat_template.jinja").write_text("what verl was given")
    latest = folder / "latest_checkpointed_iteration.txt"
    if torn:  # a kill while it writes
        latest.write_text("")
        os.kill(os.getpid(), 9)
    _zip(save / ("data_0.pt" if kind == "sft" else "data.pt"))
    latest.write_text(str(step))


def _zip(path):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("data", "x")


if __name__ == "__main__":
    main()
