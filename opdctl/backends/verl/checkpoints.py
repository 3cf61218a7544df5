"""verl's saves: which of them are whole, which one verl resumes from, and what a stage publishes from the last.

    checkpoints/global_step_N/            sft: the engine's files and data_0.pt
    checkpoints/global_step_N/actor/      rlvr, opd: the engine's files; data.pt beside
    checkpoints/latest_checkpointed_iteration.txt

The engine's files: `model|optim|extra_state_world_size_W_rank_R.pt`, `fsdp_config.json` and `huggingface/` (FSDP), or
`ckpt_contents.json` and folders (Megatron). verl writes the data position and then `latest` last, and not atomically.
"""

import logging
import re
import shutil
import subprocess
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from opdctl import processes
from opdctl.backends.contract import StageSpec
from opdctl.backends.verl.layout import layout
from opdctl.errors import StageFailed, StageRefused
from opdctl.records import read_json, write_json

logger = logging.getLogger(__name__)
LATEST = "latest_checkpointed_iteration.txt"
SET_ASIDE = "incomplete_step_"  # a save cut short, under a name that verl does not look for
_SHARDS = ("model", "optim", "extra_state")
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.index.json")  # of a Hugging Face folder


@dataclass(frozen=True)
class Saves:
    """The saves of a stage. Steps are verl's here: one is `updates` optimizer steps."""

    folder: Path
    kind: str
    updates: int
    pointer: Path  # step.json, which tells the plan how far the stage has got

    def engine(self, step: int) -> Path:
        """Where the engine's files of a save are."""
        save = self.folder / f"global_step_{step}"
        return save if self.kind == "sft" else save / "actor"

    def whole(self) -> list[int]:
        """Steps of the saves that verl can resume from, oldest first."""
        return [step for step in self._steps() if self._is_whole(step)]

    def mend(self) -> int:
        """Before a start: make verl resume from the newest whole save; its step, 0 where there is none.

        A save that was cut short is set aside, and `latest` is written again where it is missing, torn or names
        another. Raises StageRefused where saves are gone that the stage had: to start anew is the user's to decide.
        """
        whole = self.whole()
        newest = whole[-1] if whole else 0
        known = read_json(self.pointer, "step")
        if known is not None and known["step"] > newest * self.updates:
            raise StageRefused(
                f"{self.pointer} says that step {known['step']} was saved, and the newest whole save in {self.folder} "
                f"is {f'of step {newest * self.updates}' if newest else 'none at all'}",
                hint="put the folder back as it was, or start the stage anew with --rerun STAGE",
            )
        for step in self._steps():
            if step not in whole:
                aside = self.folder / f"{SET_ASIDE}{step}"
                shutil.rmtree(aside, ignore_errors=True)
                (self.folder / f"global_step_{step}").rename(aside)
        latest = self.folder / LATEST
        if newest == 0:
            latest.unlink(missing_ok=True)
        elif self.latest() != newest:
            staging = latest.with_name(f".{LATEST}.part")
            staging.write_text(str(newest))
            staging.replace(latest)
        return newest

    def latest(self) -> int | None:
        """The step that verl says it saved last; None where it says nothing that can be read."""
        try:
            return int((self.folder / LATEST).read_text())
        except (OSError, ValueError):
            return None

    def note(self, step: int, metrics: Mapping[str, float]) -> None:
        """A save is whole: the stage goes on from here."""
        write_json(self.pointer, {"step": step * self.updates, "metrics": dict(metrics)})

    def noted_metrics(self) -> dict[str, float]:
        return dict((read_json(self.pointer, "step", "metrics") or {"metrics": {}})["metrics"])

    def retain(self, count: int) -> None:
        """Delete all whole saves but the last `count`, and what was set aside."""
        # verl's own retention deletes the old save before the new one is whole
        for step in self.whole()[:-count]:
            shutil.rmtree(self.folder / f"global_step_{step}", ignore_errors=True)
        for aside in self.folder.glob(f"{SET_ASIDE}*"):
            shutil.rmtree(aside, ignore_errors=True)

    def ranks(self, step: int) -> int | None:
        """Processes that a save was written by, which must be as many to read it; None for Megatron: any number."""
        given = read_json(self.engine(step) / "fsdp_config.json", "world_size")
        return int(given["world_size"]) if given else None

    def _steps(self) -> list[int]:
        found = (re.fullmatch(r"global_step_(\d+)", path.name) for path in self.folder.glob("global_step_*"))
        return sorted(int(match.group(1)) for match in found if match)

    def _is_whole(self, step: int) -> bool:
        position = self.folder / f"global_step_{step}" / ("data_0.pt" if self.kind == "sft" else "data.pt")
        if not zipfile.is_zipfile(position):  # torch's format; its table of contents is at the end
            return False
        engine = self.engine(step)
        if (ranks := self.ranks(step)) is None:
            return (engine / "ckpt_contents.json").is_file()
        shards = [engine / f"{what}_world_size_{ranks}_rank_{rank}.pt" for what in _SHARDS for rank in range(ranks)]
        return all(map(zipfile.is_zipfile, shards)) and (engine / "huggingface" / "config.json").is_file()


def saves_of(spec: StageSpec, updates: int) -> Saves:
    return Saves(layout(spec).checkpoints, spec.kind, updates, Path(spec.state) / "step.json")


def publish(spec: StageSpec, engine: Path, init: Path, environment: Mapping[str, str]) -> None:
    """The weights of a save into `spec.output`, in the declared precision; all else as in the model that it began from.

    Written anew after loading, which compares names and shapes with config.json, tied weights with each other, and
    refuses what is not finite and a model without EOS. `environment` is for verl's own merger, where it is needed.
    """
    from opdctl.engine.checkpoint import load_policy, load_tokenizer, save_policy
    from opdctl.engine.loop import DTYPES

    precision = DTYPES[spec.config["train"]["precision"]]
    with tempfile.TemporaryDirectory(dir=spec.state, prefix="publish-") as name:
        staging = Path(name) / "model"
        weights = _weights(spec, engine, Path(name) / "merged", environment)
        staging.mkdir()
        for path in init.iterdir():
            # its chat template, not the one that verl was given; its config, not what verl was told of attention
            if path.is_file() and not any(path.match(pattern) for pattern in _WEIGHTS):
                (staging / path.name).symlink_to(path.resolve())
        for path in weights.iterdir():
            if path.suffix == ".safetensors" or path.name.endswith(".safetensors.index.json"):
                (staging / path.name).symlink_to(path.resolve())
        policy = load_policy(staging, dtype=precision)
        save_policy(policy, load_tokenizer(init), spec.output, dtype=precision)


def _weights(spec: StageSpec, engine: Path, target: Path, environment: Mapping[str, str]) -> Path:
    """A folder with the whole weights of a save: verl's export, else what its merger makes."""
    for folder in (engine / "huggingface", engine / "model" / "huggingface"):
        if any(folder.glob("*.safetensors")):
            return folder
    if spec.config["train"]["precision"] != "bfloat16":
        raise StageFailed(
            f"{engine} holds no weights in Hugging Face format, and verl.model_merger would round them to bfloat16",
            hint="the log says why verl did not write them; config.train.precision: bfloat16 would take its merger's",
        )
    backend = "fsdp" if (engine / "fsdp_config.json").exists() else "megatron"
    command = [spec.workers["python"], "-m", "verl.model_merger", "merge", "--backend", backend]
    command += ["--local_dir", str(engine), "--target_dir", str(target)]
    logger.warning("no weights in Hugging Face format in the last save: %s", " ".join(command))
    with processes.guarded(Path(spec.events).parent) as tree:
        ended = subprocess.run(command, env={**environment, **tree.environment}, check=False)
    if ended.returncode or not any(target.glob("*.safetensors")):
        raise StageFailed(
            f"the weights of {engine} could not be merged: verl.model_merger ended with exit code {ended.returncode}",
            hint="the log says more",
        )
    return target


def make_new_model(spec: StageSpec) -> None:
    """The folder of an input that is a new model: the one that the embedded engine would begin from."""
    from opdctl.engine.checkpoint import save_new_model
    from opdctl.settings import NewModel

    save_new_model(NewModel.model_validate(spec.new_model), spec.seed, layout(spec).new_model)
