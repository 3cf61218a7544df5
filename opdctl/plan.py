"""What a run would do with each stage, and why. Reads the store, changes nothing in it."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from opdctl import gates
from opdctl.backends import BACKENDS
from opdctl.digests import installed
from opdctl.errors import ConfigError
from opdctl.fetch import COMMIT, hub_commit
from opdctl.formulas import describe_merge, describe_opd, describe_rlvr
from opdctl.identity import fingerprint, identity
from opdctl.memory import Memory, Shape, Training, shape_of_folder, shape_of_new, training_memory
from opdctl.pipeline import Pipeline, Stage
from opdctl.references import Addresses, Input
from opdctl.settings import (
    AnyStage,
    FileTask,
    HarnessSettings,
    NewModel,
    OpdSettings,
    PublicTask,
    RlvrSettings,
    SampleSettings,
    SftSettings,
    ToolTaskSettings,
)
from opdctl.settings.merge import MergeSettings
from opdctl.store import Parent, Record, RunDir, StageDir

SHOWN = 4  # differences named in one reason


class Decision(StrEnum):
    RUN = "run"
    RESUME = "resume"
    REUSE = "reuse"
    REFUSED = "refused"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class PlannedStage:
    stage: Stage
    decision: Decision
    reason: str
    identity: Mapping[str, Any]
    fingerprint: str
    parents: tuple[Parent, ...]  # record ids of parents that are still to run: None
    resume_step: int | None  # that a resumed stage goes on from, where its backend says so
    total_steps: int
    formula: str  # what RL and OPD stages minimise, and how a merge computes; else ""
    memory: Memory | None  # at most, of training by the embedded engine where the model's shape is known
    reuse_from: StageDir | None = None  # REUSE of a checkpoint that is not in force here yet: link it
    broken: tuple[gates.Broken, ...] = ()  # gates that a finished stage did not pass


@dataclass(frozen=True)
class Plan:
    pipeline: Pipeline
    run: RunDir
    stages: tuple[PlannedStage, ...]  # each after all that it reads
    accept: tuple[str, ...] = ()  # checks of the gate whose refusals are accepted, beside those that stages name
    pins: Mapping[str, str | None] = field(default_factory=dict)  # hf reference with a branch -> commit; None: unknown


def make_plan(pipeline: Pipeline, run: RunDir, *, only: Sequence[str] = (), rerun: Sequence[str] = ()) -> Plan:
    """Decide on every stage. `only` and `rerun` select stages; with `only`, all others are left alone.

    The hub is asked which commits the branches in `hf:` references stand for, and the plan is made with these commits.

    Raises ConfigError for a selector that matches nothing, data that cannot be read, or a gate on a metric that the
    stage is known not to have; StageRefused for a repository or a revision that does not exist.
    """
    pipeline, pins = _pinned(pipeline)
    addresses = Addresses(pipeline.stages)
    again = _selected(addresses, rerun, "--rerun")
    selected = _selected(addresses, only, "--only") | again if only else set(pipeline.stages)
    return replace(_Planner(pipeline, run, selected, again).plan(), pins=pins)


def _pinned(pipeline: Pipeline) -> tuple[Pipeline, dict[str, str | None]]:
    inputs = [given for stage in pipeline.stages.values() for given in stage.inputs if given.kind == "hf"]
    targets = dict.fromkeys(given.target for given in inputs)
    commits = {target: hub_commit(target) for target in targets if not COMMIT.fullmatch(target.partition("@")[2])}
    if not commits:
        return pipeline, {}

    def pin(given: Input) -> Input:
        commit = commits.get(given.target) if given.kind == "hf" else None
        return replace(given, target=f"{given.target.partition('@')[0]}@{commit}") if commit else given

    stages = {
        name: replace(stage, inputs=tuple(pin(given) for given in stage.inputs))
        for name, stage in pipeline.stages.items()
    }
    return replace(pipeline, stages=stages), {f"hf:{target}": commit for target, commit in commits.items()}


def changes(before: Any, after: Any, key: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Leaves that differ: key, old and new value; None where there is no such key."""
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for name in [*before, *(name for name in after if name not in before)]:
            yield from changes(before.get(name), after.get(name), f"{key}.{name}" if key else name)
    elif before != after:
        yield key, before, after


def _selected(addresses: Addresses, selectors: Sequence[str], option: str) -> set[str]:
    found: set[str] = set()
    problems: list[str] = []
    for selector in selectors:
        try:
            found.update(addresses.select(selector))
        except ConfigError as error:
            problems.append(f"{option} {selector}: {error}")
    if problems:
        raise ConfigError(problems)
    return found


Verdict = tuple[Decision, str, StageDir | None]


class _Planner:
    def __init__(self, pipeline: Pipeline, run: RunDir, selected: set[str], again: set[str]) -> None:
        self.pipeline = pipeline
        self.run = run
        self.workspace = run.workspace
        self.selected = selected
        self.again = again
        self.needed = {name for stage in selected for name in pipeline.stages[stage].upstream()}
        self.concerned = set(selected)  # and all that these depend on: whose gates count
        for name in reversed(list(pipeline.stages)):
            if name in self.concerned:
                self.concerned |= pipeline.stages[name].upstream()
        self.held: dict[str, str] = {}  # stage whose dependants are skipped -> the gate that says so
        self.digests = self.workspace.digests()
        self.data: dict[str, Any] = {}
        self.planned: dict[str, PlannedStage] = {}
        self.records: dict[str, Record] = {}  # of stages that are finished and stay as they are

    def plan(self) -> Plan:
        for name, stage in self.pipeline.stages.items():
            self.planned[name] = self._stage(stage)
        self.digests.save()
        found = [(name, gate) for name, item in self.planned.items() for gate in item.broken]
        if unknown := [f"stages.{name}.gates: {gate.text}{gate.known}" for name, gate in found if gate.unknown]:
            raise ConfigError(unknown, hint=f"all metrics: opdctl status {self.run.name} --json")
        stages = list(self.planned.values())
        if stops := [f"gate of {name}: {gate.text}" for name, gate in found if gate.action == "stop"]:
            stages = [_stopped(item, stops[0]) for item in stages]
        return Plan(self.pipeline, self.run, tuple(stages))

    def _stage(self, stage: Stage) -> PlannedStage:
        parents = tuple(self._parent(stage, at) for at in range(len(stage.inputs)))
        payload = self._identity(stage)
        told = formula(stage.settings, [(given.role, given.label, given.weight) for given in stage.inputs])
        steps, memory = _total_steps(stage), self._memory(stage)
        draft = PlannedStage(stage, Decision.RUN, "", payload, fingerprint(payload), parents, None, steps, told, memory)
        decision, reason, source = self._decide(draft)
        if stage.name not in self.selected and not (decision is Decision.REUSE and stage.name in self.needed):
            decision, reason = Decision.SKIPPED, "not in --only"
        step = self.run.stage(stage.name).state_step() if decision is Decision.RESUME else None
        broken = tuple(self._broken(draft)) if stage.name in self.concerned else ()
        for gate in broken:
            if gate.action == "skip":
                self.held[stage.name] = f"gate of {stage.name}: {gate.text}"
        return replace(draft, decision=decision, reason=reason, reuse_from=source, resume_step=step, broken=broken)

    def _broken(self, draft: PlannedStage) -> Iterator[gates.Broken]:
        """By the record that stays in force; of one that is going to be replaced by its like, names of metrics only."""
        record = self.records.get(draft.stage.name)
        last = record or self.run.stage(draft.stage.name).record()
        if last is not None and last.fingerprint == draft.fingerprint:
            found = gates.broken(draft.stage.settings.gates, last.metrics)
            yield from (gate for gate in found if gate.unknown or record is not None)

    def _parent(self, stage: Stage, at: int) -> Parent:
        given = stage.inputs[at]
        record = self.records.get(given.target) if given.kind == "stage" else None
        return Parent(given.role, given.label, given.ref, record.id if record else None)

    def _memory(self, stage: Stage) -> Memory | None:
        settings, shape = stage.settings, self._shape(stage)
        if shape is None or settings.backend != "embedded" or not isinstance(settings.config, Training):
            return None
        roles, gpu = [given.role for given in stage.inputs], settings.resources.gpus > 0
        return training_memory(shape, settings.config, settings.resources, roles=roles, gpu=gpu)

    def _shape(self, stage: Stage) -> Shape | None:
        """Of the model that the stage begins with, where its config.json is at hand."""
        given = next((given for given in stage.inputs if given.role in ("init", "student", "models")), None)
        model = self.pipeline.settings.model
        if given is None or given.kind not in ("stage", "model", "path"):
            return None
        if given.kind == "stage":
            return self._shape(self.pipeline.stages[given.target])
        if given.kind == "path":
            return shape_of_folder(self.pipeline.folder / given.target)
        return shape_of_new(model) if isinstance(model, NewModel) else None

    # ------------------------------------------------------------------ identity

    def _identity(self, stage: Stage) -> dict[str, Any]:
        inputs: dict[str, Any] = {}
        for given in stage.inputs:
            match given.kind:
                case "stage":
                    inputs[given.ref] = self.planned[given.target].fingerprint
                case "model":
                    inputs[given.ref] = self.pipeline.settings.model.model_dump(mode="json")
                case "path":
                    inputs[given.ref] = self.digests.model(self.pipeline.folder / given.target)
                case "gguf":
                    inputs[given.ref] = {"gguf": self.digests.file(self.pipeline.folder / given.target)}
                case "hf":
                    inputs[given.ref] = given.ref
        data = {
            name: self._data(name, t)
            for name, t in stage.settings.tasks.items()
            if isinstance(t, FileTask | PublicTask | ToolTaskSettings)
        }
        if isinstance(stage.settings.config, HarnessSettings):
            data |= self._harness(stage.settings.config)
        return identity(stage, inputs, data, BACKENDS[stage.settings.backend].REVISION)

    def _harness(self, config: HarnessSettings) -> dict[str, Any]:
        """Its packaged tasks change with its version."""
        folder = config.include_path
        files = {} if folder is None else self.digests.tree(self.pipeline.folder / folder)
        return {"include_path": files, "lm_eval": installed("lm_eval")}

    def _data(self, name: str, task: FileTask | PublicTask | ToolTaskSettings) -> Any:
        if isinstance(task, ToolTaskSettings):
            paths = {key: self.pipeline.folder / path for key, path in task.files().items()}
            return {
                key: (self.digests.tree if path.is_dir() else self.digests.file)(path) for key, path in paths.items()
            }
        if isinstance(task, PublicTask):
            files = {file: self.digests.file(self.pipeline.folder / path) for file, path in task.files().items()}
            return files | {package: installed(package) for package in task.PACKAGES}
        if name not in self.data:
            from opdctl.tasks.files import data_digest

            digests = data_digest(task, self.pipeline.folder, self.digests.file)
            rows = {"rows": digests.pop(task.path)}
            if task.eval_path is not None:
                rows["eval_rows"] = digests.pop(task.eval_path, rows["rows"])
            self.data[name] = rows | ({"verifier": list(digests.values())} if digests else {})
        return self.data[name]

    # ------------------------------------------------------------------ decisions

    def _decide(self, draft: PlannedStage) -> Verdict:
        name = draft.stage.name
        upstream = [self.planned[given] for given in self.pipeline.stages if given in draft.stage.upstream()]
        for item in upstream:
            if reason := self.held.get(item.stage.name):
                self.held[name] = reason
                return Decision.SKIPPED, reason, None
        waiting = [item for item in upstream if item.stage.name not in self.records]
        if name in self.again:
            return self._blocked(waiting) or (Decision.RUN, "asked for with --rerun", None)
        if not waiting and (verdict := self._finished(draft)):
            return verdict
        if verdict := self._blocked(waiting):
            return verdict
        return self._half_trained(draft, waiting) or (Decision.RUN, self._why(draft, waiting), None)

    def _blocked(self, waiting: Sequence[PlannedStage]) -> Verdict | None:
        for item in waiting:
            if item.decision is Decision.REFUSED:
                return Decision.REFUSED, f"reads {item.stage.name}, which is refused", None
            if item.decision is Decision.SKIPPED:
                return Decision.REFUSED, f"reads {item.stage.name}, which is not finished and not in --only", None
        return None

    def _finished(self, draft: PlannedStage) -> Verdict | None:
        directory = self.run.stage(draft.stage.name)
        ids = [parent.record_id for parent in draft.parents]
        record = directory.record()
        if record is not None and record.fingerprint == draft.fingerprint and record.parent_ids() == ids:
            self.records[draft.stage.name] = record
            source = directory.reference()
            where = f", from run {source.run}" if source else ""
            return Decision.REUSE, f"finished{where}, at step {record.step}", None
        found = self.workspace.find(draft.fingerprint, ids)
        record = found.record() if found else None
        if found is None or record is None:
            return None
        self.records[draft.stage.name] = record
        earlier = "earlier in this run" if found.path == directory.path else f"in run {found.run}, stage {found.name}"
        return Decision.REUSE, f"finished {earlier}, at step {record.step}", found

    def _half_trained(self, draft: PlannedStage, waiting: Sequence[PlannedStage]) -> Verdict | None:
        directory = self.run.stage(draft.stage.name)
        before = directory.unfinished()
        if before is None:
            return None
        step = directory.state_step()
        at = f"at step {step}" if step is not None else "in part"
        differences = list(changes(before, draft.identity))
        if differences and draft.stage.settings.kind in ("eval", "merge", "select"):
            return None  # what is dropped are a few scores, or nothing
        if differences and not _only_longer(draft, differences, step):
            told = "; ".join(_told(differences)) or "those of a stage that it reads"
            return (
                Decision.REFUSED,
                f"half-trained {at} with other settings: {told} "
                f"(--rerun '{draft.stage.name}' starts it anew; another --run keeps both)",
                None,
            )
        if waiting:
            return (
                Decision.RUN,
                f"reads {_names(waiting)}, which {_run(waiting)} again; half-trained state {at} is dropped",
                None,
            )
        if directory.unfinished_parents() != [parent.record_id for parent in draft.parents]:
            return Decision.RUN, f"its inputs were trained anew; half-trained state {at} is dropped", None
        return Decision.RESUME, f"half-trained {at}" + "".join(f"; {line}" for line in _told(differences)), None

    def _why(self, draft: PlannedStage, waiting: Sequence[PlannedStage]) -> str:
        """Of a stage that has to run from its start."""
        directory = self.run.stage(draft.stage.name)
        record = directory.record()
        if record is None:
            return directory.damage() or "not run yet"
        own = _told(changes(record.identity, draft.identity))
        if own:
            return "; ".join(own)
        if waiting:
            return f"reads {_names(waiting)}, which {_run(waiting)} again"
        then = {(parent.role, parent.ref): parent.record_id for parent in record.parents}
        anew = [p.label for p in draft.parents if p.record_id and then.get((p.role, p.ref), "") != p.record_id]
        if anew:
            return f"reads {', '.join(dict.fromkeys(anew))}, which is another checkpoint than before"
        return "its inputs are not those it was made from"


def _stopped(item: PlannedStage, reason: str) -> PlannedStage:
    waits = item.decision in (Decision.RUN, Decision.RESUME)
    return replace(item, decision=Decision.SKIPPED, reason=reason) if waits else item


def _only_longer(draft: PlannedStage, differences: Sequence[tuple[str, Any, Any]], step: int | None) -> bool:
    """More steps go on from half-trained state where no schedule depends on their number."""
    config = draft.stage.settings.config
    if [key for key, _, _ in differences] != ["config.train.max_steps"] or not isinstance(
        config, SftSettings | RlvrSettings | OpdSettings
    ):
        return False
    anneals = isinstance(config, RlvrSettings) and config.effort is not None and config.effort.anneal == "gradual"
    grown = differences[0][2] > differences[0][1] or (step is not None and differences[0][2] >= step)
    return grown and config.train.optimizer.schedule == "constant" and not anneals


def _told(differences: Iterator[tuple[str, Any, Any]] | Sequence[tuple[str, Any, Any]]) -> list[str]:
    """`config.train.optimizer.lr: 0.001 -> 0.002`; inputs are told by their stages."""
    lines = [f"{key}: {_show(old)} -> {_show(new)}" for key, old, new in differences if not key.startswith("inputs")]
    return lines if len(lines) <= SHOWN else [*lines[:SHOWN], f"and {len(lines) - SHOWN} more"]


def _show(value: Any) -> str:
    text = "nothing" if value is None else value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _names(stages: Sequence[PlannedStage]) -> str:
    names = [item.stage.name for item in stages]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _run(stages: Sequence[PlannedStage]) -> str:
    return "runs" if len(stages) == 1 else "run"


def _total_steps(stage: Stage) -> int:
    config = stage.settings.config
    if isinstance(config, SftSettings | RlvrSettings | OpdSettings):
        return config.train.max_steps
    if isinstance(config, SampleSettings):
        return config.rollout.prompts * len(config.data.tasks) * max(1, len(config.data.efforts))
    return sum(given.role not in ("budget", "grader", "report") for given in stage.inputs)


def formula(settings: AnyStage, inputs: Iterable[tuple[str, str, float]]) -> str:
    """What a stage of RL or OPD minimises, how a merge computes; else "". `inputs`: role, name, weight."""
    match config := settings.config:
        case RlvrSettings():
            return describe_rlvr(config)
        case OpdSettings():
            return describe_opd(config, {name: weight for role, name, weight in inputs if role == "teachers"})
        case MergeSettings():
            return describe_merge(config, [weight for role, _, weight in inputs if role == "models"])
    return ""
