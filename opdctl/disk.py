"""What a plan is going to write, against the free space of the workspace's file system.

Symbols: P weights, w bytes of one (4, or 2 in bfloat16), T trained weights (P, or those of the adapters), S training
steps, N rows, C tokens of a completion. Estimates are above what is written: of SFT runs of small models, what stayed
was 80 to 100 % of its forecast and the peak 50 to 100 % (`tests/test_disk.py`); other kinds and verl are arithmetic
only.
"""

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from opdctl.errors import StageRefused
from opdctl.memory import GIB, Shape, Training, shape_of_folder, shape_of_new
from opdctl.pipeline import Pipeline, Stage
from opdctl.plan import Decision, Plan, PlannedStage
from opdctl.records import read_json
from opdctl.settings import EvalSettings, NewModel, OpdSettings, SampleSettings, SftSettings

# Bytes, rounded up from what small runs left.
NOTES = 48 << 10  # of a stage: spec, identity, record, the gate's verdicts, the head of its log
STEP = 2 << 10  # an event and its line of the log
TRACKED_STEP = 4 << 10  # its metrics in MLflow's database
DATABASE = 2 << 20  # an MLflow database with nothing in it, and its artifacts
TOKEN = 12  # a token as JSON or text
ROW = 256  # of a table, besides its tokens
WORD = 64  # of a tokenizer's vocabulary
WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
BESIDE = (".json", ".jinja", ".model", ".txt")  # of what lies in a model's folder, what is copied


@dataclass(frozen=True)
class Size:
    """Of a model."""

    weights: int  # P
    beside: int  # bytes of its tokenizer and configurations
    shape: Shape | None  # where it is known


@dataclass(frozen=True)
class Writes:
    """Bytes that one stage writes. None: the size of its model is not known before it runs."""

    kept: int | None  # what it publishes and leaves beside
    passing: int | None  # at most at once while it runs, besides: saves of its state and what goes with them


@dataclass(frozen=True)
class Forecast:
    folder: Path
    free: int  # bytes
    reserve: int  # that have to stay free
    together: int  # stages that run at once, at most
    tracking: int
    stages: Mapping[str, Writes] = field(default_factory=dict)  # those that are going to run

    @property
    def kept(self) -> int:
        return sum(one.kept or 0 for one in self.stages.values())

    @property
    def passing(self) -> int:
        """Of the stages that pass most, as many as run at once."""
        return sum(sorted((one.passing or 0 for one in self.stages.values()), reverse=True)[: self.together])

    @property
    def needed(self) -> int:
        return self.kept + self.passing + self.tracking

    @property
    def unknown(self) -> list[str]:
        return [name for name, one in self.stages.items() if one.kept is None]

    @property
    def fits(self) -> bool:
        return not self.stages or self.needed + self.reserve <= self.free


def forecast(plan: Plan) -> Forecast:
    settings = plan.pipeline.settings
    work = [item for item in plan.stages if item.decision in (Decision.RUN, Decision.RESUME)]
    steps = sum(item.total_steps for item in work)
    return Forecast(
        folder=plan.run.workspace.path,
        free=free(plan.run.workspace.path),
        reserve=round(settings.disk.reserve_gib * GIB),
        together=settings.machine.slots,
        tracking=DATABASE + TRACKED_STEP * steps if settings.tracking.enabled and not settings.tracking.uri else 0,
        stages={item.stage.name: _writes(item, plan.pipeline) for item in work},
    )


def check(plan: Plan, report: Callable[[str], None]) -> None:
    """Before anything starts. Raises StageRefused where what is planned does not fit, or reports it, by
    `disk.forecast`."""
    asked = plan.pipeline.settings.disk.forecast
    if asked == "off":
        return
    found = forecast(plan)
    if found.fits:
        return
    if asked == "warn":
        report(describe(found))
        return
    raise StageRefused(
        describe(found),
        hint="free space (opdctl gc says what can go), choose another --workspace, or set disk.forecast: warn",
    )


def describe(found: Forecast) -> str:
    """One line."""
    parts = [f"checkpoints {gib(found.kept)}", f"while running {gib(found.passing)}"]
    parts += [f"tracking {gib(found.tracking)}"] if found.tracking else []
    text = f"disk: writes up to {gib(found.needed)} ({', '.join(parts)}); {gib(found.free)} free at {found.folder}"
    if found.unknown:
        text += f"; not counted, for their models are not here yet: {', '.join(found.unknown)}"
    if not found.fits:
        text += f": too little, with {gib(found.reserve)} to stay free (disk.reserve_gib)"
    return text


def data(found: Forecast) -> dict[str, Any]:
    """In bytes."""
    stages = {name: {"kept": one.kept, "passing": one.passing} for name, one in found.stages.items()}
    keys = ("needed", "kept", "passing", "tracking", "free", "reserve", "unknown", "fits")
    return {key: getattr(found, key) for key in keys} | {"stages": stages}


def free(folder: Path) -> int:
    """Bytes on the file system of a folder that may still have to be made."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def gib(count: int) -> str:
    return f"{count / GIB:,.1f} GiB" if count >= GIB else f"{count / 2**20:,.1f} MiB"


# ---------------------------------------------------------------------------------------------------- one stage


def _writes(item: PlannedStage, pipeline: Pipeline) -> Writes:
    stage, config = item.stage, item.stage.settings.config
    beside = NOTES + STEP * item.total_steps
    match config:
        case EvalSettings():
            cells = len(config.data.tasks) * max(1, len(config.data.efforts))
            rows = config.rollout.prompts * config.rollout.group_size * cells * item.total_steps
            return Writes(beside + ROW * rows, rows * (ROW + 2 * TOKEN * config.rollout.max_completion_tokens))
        case SampleSettings():
            rows = item.total_steps * config.rollout.group_size
            text = rows * (ROW + TOKEN * (config.rollout.max_prompt_tokens + config.rollout.max_completion_tokens))
            return Writes(beside + text, text)
    size = _model(pipeline, stage)
    if stage.settings.kind not in ("sft", "rlvr", "opd", "merge", "select"):  # a harness: scores, and no model
        return Writes(beside, 0)
    if size is None:
        return Writes(None, None)
    w = 2 if _precision(config) == "bfloat16" else 4
    published = w * size.weights + size.beside + beside
    if not isinstance(config, Training):  # what is merged or chosen is written once
        return Writes(published, 0)
    if stage.settings.backend == "verl":
        return Writes(published, _verl_passing(stage, config, size, w))
    adapters = _adapters(config, size)
    return Writes(published + 4 * adapters, _passing(stage, config, size, w))


def _passing(stage: Stage, config: Training, size: Size, w: int) -> int:
    """Of the embedded engine: a save beside the last one (weights, two moments, masters), and a batch of rollouts."""
    adapters = _adapters(config, size)
    trained, w, masters = (adapters, 4, 0) if adapters else (size.weights, w, 4 if w == 2 else 0)
    save = (w + 8 + masters) * trained
    if isinstance(config, OpdSettings) and config.extrapolation is not None:
        save += 4 * trained  # the weights that it extrapolates from
    return 2 * (save + size.beside) + _batch(stage, config, size, w)


def _batch(stage: Stage, config: Training, size: Size, w: int) -> int:
    """Teacher states of a batch of rollouts, and its journal."""
    if isinstance(config, SftSettings):
        return 0
    rollout = config.rollout
    tokens = rollout.prompts * rollout.group_size * rollout.max_completion_tokens
    total = 2 * TOKEN * tokens * (config.train.save_every if rollout.journal is not None else 0)
    if stage.settings.resources.teacher_states == "cached" and size.shape is not None:
        roles = [given.role for given in stage.inputs]
        models = ("teachers" in roles) + roles.count("reference")  # a row has one teacher
        total += w * tokens * size.shape.hidden * models
    return total


def _verl_passing(stage: Stage, config: Training, size: Size, w: int) -> int:
    """verl's saves: weights and two moments in float32, and the weights once more in Hugging Face's format."""
    saves = stage.settings.resources.verl.keep_last + 1  # the new one is whole before an old one goes
    merged = w * size.weights  # while it is published
    return saves * ((4 + 8 + 4) * size.weights + size.beside) + merged + _converted(config)


def _converted(config: Training) -> int:
    if isinstance(config, SftSettings):
        return 0
    rollout = config.rollout
    rows = rollout.prompts * -(-config.train.max_steps // max(1, config.updates))
    return rows * (ROW + 2 * TOKEN * rollout.max_prompt_tokens)


def _adapters(config: Training, size: Size) -> int:
    """Weights of the adapters; 0 without, or where the model's shape is not known."""
    lora = config.train.lora
    return lora.rank * size.shape.layers * size.shape.sides if lora is not None and size.shape is not None else 0


def _precision(config: Any) -> str:
    train = getattr(config, "train", None)
    return str(train.precision if train is not None else getattr(config, "precision", "float32"))


# ---------------------------------------------------------------------------------------------------- the model


def _model(pipeline: Pipeline, stage: Stage) -> Size | None:
    """What the stage begins with, and so what it publishes; None where that is not at hand."""
    given = next((given for given in stage.inputs if given.role in ("init", "student", "models")), None)
    if given is None:
        return None
    settings = pipeline.settings.model
    match given.kind:
        case "stage":
            return _model(pipeline, pipeline.stages[given.target])
        case "path":
            return size_of_folder(pipeline.folder / given.target)
        case "model" if isinstance(settings, NewModel):
            return size_of_new(settings)
    return None


def size_of_new(model: NewModel) -> Size | None:
    shape = shape_of_new(model)
    if shape is None:
        return None
    norms = shape.layers * 2 * (shape.hidden + shape.head) + shape.hidden
    return Size(shape.weights + norms, 8192 + WORD * shape.vocab, shape)


def size_of_folder(folder: Path) -> Size | None:
    """By the sizes of its files; None for a folder without weights."""
    files = [path for path in folder.glob("*") if path.is_file()] if folder.is_dir() else []
    weights = [path for path in files if any(path.match(pattern) for pattern in WEIGHTS)]
    if not weights:
        return None
    config: Mapping[str, Any] = read_json(folder / "config.json") or {}
    dtype = config.get("dtype") or config.get("torch_dtype") or "float32"
    bytes_each = 2 if "16" in str(dtype) else 4
    beside = sum(path.stat().st_size for path in files if path not in weights and path.suffix in BESIDE)
    return Size(sum(path.stat().st_size for path in weights) // bytes_each, beside, shape_of_folder(folder))
