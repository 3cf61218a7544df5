"""Small pipelines for `toy_backend`, without torch and without a pipeline file."""

import hashlib
import sys
from pathlib import Path

import toy_backend

from opdctl.backends import BACKENDS
from opdctl.pipeline import Pipeline, expand
from opdctl.plan import make_plan
from opdctl.runner import Outcome, Silent, execute
from opdctl.store import Workspace

FOLDER = Path(__file__).parent
SHAPE = {
    "num_hidden_layers": 1,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 8,
}


def sft(init="model:", *, steps=4, task="plain", lr=0.1, **more):
    """A stage that reads one model; `task` names its knobs, see `pipeline`."""
    train = {"max_steps": steps, "global_batch_size": 1, "save_every": 2, "optimizer": {"lr": lr}}
    return {
        "kind": "sft",
        "backend": "embedded",
        "inputs": {"init": init},
        "config": {"data": {"tasks": [task]}, "train": train},
        **more,
    }


def evaluation(*models, task="plain"):
    rollout = {"prompts": 1, "max_prompt_tokens": 8, "max_completion_tokens": 8}
    return {
        "kind": "eval",
        "backend": "embedded",
        "inputs": {"models": list(models)},
        "config": {"data": {"tasks": [task]}, "rollout": rollout},
    }


def pipeline(stages, *, knobs=None, folder=None, name="toy", **more) -> Pipeline:
    """`knobs`: task -> what `toy_backend` does with stages whose data is that task."""
    tasks = {"plain": {}} | (knobs or {})
    tree = {
        "name": name,
        "model": {"source": "new", "shape": SHAPE, "tokenizer": {"words": ["<pad>", "<bos>", "<eos>", "a"]}},
        "tasks": {task: {"task": "chain", "domain": "math", "strides": given} for task, given in tasks.items()},
        "machine": {"slots": 2, "cpus": 2},
        "tracking": {"enabled": False},
        "gate": {"enabled": False},  # there is nothing to ask a toy model
        "retry": {"attempts": 0},
        "stages": stages,
        **more,
    }
    return expand(tree, folder=folder or Path.cwd())


def run(wanted: Pipeline, run_name="r", *, reporter=None, rerun=(), only=()) -> Outcome:
    """Plan and execute in this process, in the workspace that the pipeline names, on the toy backend."""
    real, BACKENDS["embedded"] = BACKENDS["embedded"], toy_backend
    try:
        folder = Workspace(wanted.folder).run(run_name)
        return execute(make_plan(wanted, folder, rerun=rerun, only=only), reporter=reporter or Silent())
    finally:
        BACKENDS["embedded"] = real


def stage(wanted: Pipeline, name: str, run_name="r"):
    return Workspace(wanted.folder).run(run_name).stage(name)


def digests(wanted: Pipeline, run_name="r") -> dict[str, str]:
    """Stage -> sha256 of what it published."""
    found = {}
    for name in wanted.stages:
        folder = stage(wanted, name, run_name).checkpoint
        files = sorted(path for path in folder.iterdir() if path.suffix == ".safetensors" or path.name == "report.json")
        found[name] = hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()
    return found


class Notes(Silent):
    """A reporter that keeps what it is told."""

    def __init__(self):
        self.calls = []

    def started(self, stage, attempt):
        self.calls.append(("started", stage, attempt))

    def progress(self, stage, event):
        self.calls.append(("progress", stage, event.step))

    def finished(self, stage, record):
        self.calls.append(("finished", stage, record.step))

    def failed(self, stage, message, log_tail):
        self.calls.append(("failed", stage, message, log_tail))

    def reused(self, stage, reason):
        self.calls.append(("reused", stage, reason))

    def message(self, text):
        self.calls.append(("message", text))

    def of(self, kind):
        return [call[1:] for call in self.calls if call[0] == kind]


def killable(folder: Path, **more) -> Pipeline:
    """Two stages side by side between one before and one after, some tenths of a second in all."""
    stages = {
        "sft": sft(steps=15),
        "a": sft("stage:sft", steps=20),
        "b": sft("stage:sft", steps=20, lr=0.2, seed=1),
        "c": sft("stage:a", steps=10),
        "eval": evaluation("stage:sft", "stage:b", "stage:c"),
    }
    return pipeline(stages, knobs={"plain": {"sleep_ms": 15}}, folder=folder, **more)


if __name__ == "__main__":
    tracking = {"enabled": "tracked" in sys.argv[2:]}
    outcome = run(killable(Path(sys.argv[1]), tracking=tracking))
    print(outcome)
    sys.exit(130 if outcome.interrupted else 1 if outcome.failed else 0)
