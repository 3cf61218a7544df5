"""How a stage's mixture reaches it: which task, and which teacher, gets how much of each optimizer step."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from opdctl.backends.contract import InputSpec
from opdctl.backends.verl.data import shuffled_batch
from opdctl.data.check import Finding
from opdctl.engine.rows import Mixer, Row, stream_seed
from opdctl.engine.teachers import Router
from opdctl.errors import StageRefused
from opdctl.pipeline import Pipeline, Stage
from opdctl.settings import OpdSettings, RlvrSettings
from opdctl.tasks import Task, load_task

BATCHES = 32  # rollout batches that are looked at


@dataclass(frozen=True)
class Share:
    """Of one teacher (distillation) or task (RL)."""

    label: str
    share: float  # of all rows looked at
    fewest_of_batch: int  # rows of a rollout batch
    most_of_batch: int
    fewest: int  # rows of an optimizer step
    most: int


@dataclass(frozen=True)
class Interleaving:
    stage: str
    by: str  # teacher, task
    rows: int  # prompts of an optimizer step
    steps: int  # looked at
    shares: list[Share]
    longest_run: int  # rows of one teacher, or task, in a row, as they are dealt to the steps
    findings: list[Finding]


def interleavings(pipeline: Pipeline, task: str) -> list[Interleaving]:
    """Of the pipeline's RL and distillation stages that read the task: one for all instances of a fan-out."""
    found: dict[str, Interleaving] = {}
    tasks: dict[str, Task] = {}
    for stage in pipeline.stages.values():
        config = stage.settings.config
        if not isinstance(config, OpdSettings | RlvrSettings) or task not in config.data.tasks:
            continue
        if len(config.data.tasks) < 2 and isinstance(config, RlvrSettings):
            continue
        for name in config.data.tasks:
            if name not in tasks:
                efforts = pipeline.settings.efforts
                tasks[name] = load_task(name, stage.settings.tasks[name], efforts, Path(pipeline.folder))
        found.setdefault(stage.base, _of(stage, {name: tasks[name] for name in config.data.tasks}, config))
    return list(found.values())


def _of(stage: Stage, tasks: Mapping[str, Task], config: OpdSettings | RlvrSettings) -> Interleaving:
    kind, by = ("opd", "teacher") if isinstance(config, OpdSettings) else ("rlvr", "task")
    mixer = Mixer(dict(tasks), config.data, "train", stream_seed(stage.seed, kind))
    size, findings = config.rollout.prompts // config.updates, list[Finding]()
    try:
        dealt = _dealt(mixer, stage, config)
    except StageRefused as error:
        findings.append(Finding(True, f"stages.{stage.name}: {error} ({error.hint})"))
        return Interleaving(stage.name, by, size, 0, [], 0, findings)
    shares = [
        Share(label, count / len(dealt), *_range(dealt, label, config.rollout.prompts), *_range(dealt, label, size))
        for label, count in sorted(Counter(dealt).items())
    ]
    for share in shares:
        if share.fewest == 0 and share.share * size >= 1:
            text = f"{share.label} has {share.share:.1%} of the rows, and none in some optimizer steps"
            findings.append(Finding(False, f"stages.{stage.name}: {text}"))
    longest = max(len(list(run)) for _, run in groupby(dealt))
    return Interleaving(stage.name, by, size, len(dealt) // size, shares, longest, findings)


def _range(dealt: Sequence[str], label: str, size: int) -> tuple[int, int]:
    """Fewest and most rows of a label among `size` rows that belong together."""
    counts = [dealt[start : start + size].count(label) for start in range(0, len(dealt), size)]
    return min(counts), max(counts)


def _dealt(mixer: Mixer, stage: Stage, config: OpdSettings | RlvrSettings) -> list[str]:
    """Teacher, or task, of each row, in the order in which rollout batches are dealt to optimizer steps."""
    size, kind = config.rollout.prompts, "opd" if isinstance(config, OpdSettings) else "rlvr"
    names = _teachers(stage, config) if isinstance(config, OpdSettings) else lambda row: row.task
    found = []
    for batch in range(BATCHES):
        rows = mixer.rows(batch * size, size)
        found += [names(rows[at]) for at in shuffled_batch(stage.seed, kind, batch * config.updates, size)]
    return found


def _teachers(stage: Stage, config: OpdSettings) -> Callable[[Row], str]:
    given = [one for one in stage.inputs if one.role == "teachers"]
    specs = [InputSpec(one.role, one.label, "", dict(one.route)) for one in given]
    router = Router(specs, config.route_by, config.default_teacher)
    return lambda row: given[router.teacher(row.prompt.columns)].label
