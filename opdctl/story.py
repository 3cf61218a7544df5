"""One run as it went: every stage with what it read, minimised, cost, decided and published."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from opdctl.comparison import Curve, Ledger, curves
from opdctl.comparison.costs import Spent
from opdctl.errors import ConfigError
from opdctl.gates import broken, describe
from opdctl.pipeline import KINDS
from opdctl.plan import formula
from opdctl.records import SELECTION, Parent, Record, read_json
from opdctl.references import Addresses, unseeded
from opdctl.settings import AnyStage, SftSettings
from opdctl.store import RunDir
from opdctl.validation import validate

SFT = "-mean over completion tokens of log pi(y_t | x, y_<t), on demonstrations"


@dataclass(frozen=True)
class Link:
    """Something that a stage read: a stage of the run, or a model from outside."""

    role: str
    target: str
    record_id: str = ""
    weight: float = 1.0


@dataclass(frozen=True)
class Decision:
    """Of a gate, a selection, or a filter of samples."""

    what: str
    outcome: str
    passed: bool = True


@dataclass(frozen=True)
class Chapter:
    """A stage."""

    name: str
    kind: str
    backend: str
    links: Sequence[Link]
    record: Record | None
    formula: str
    settings: Mapping[str, Any]  # dotted key -> value, of those that are not the default
    decisions: Sequence[Decision]
    curves: Mapping[str, Curve]
    spent: Spent

    @property
    def base(self) -> str:
        return self.name.partition("[")[0]


@dataclass(frozen=True)
class Story:
    run: str
    info: Mapping[str, Any]  # who started it, when and how
    pipeline: Mapping[str, Any]
    chapters: Sequence[Chapter]


def tell(run: RunDir) -> Story:
    """All of a run that its files tell. Raises ConfigError for one that has not started."""
    pipeline = run.read_pipeline()
    stages: Mapping[str, Mapping[str, Any]] = pipeline.get("stages", {})
    if not stages:
        raise ConfigError(f"run {run.name} has no stages yet", hint=f"see: opdctl status {run.name}")
    finished = [run.stage(name) for name in stages if run.stage(name).record()]
    ledger = Ledger(run.workspace, finished)
    names: dict[str, list[str]] = {}  # record -> stages of this run that it is the checkpoint of
    for stage in finished:
        if record := stage.record():
            names.setdefault(record.id, []).append(stage.name)
    chapters = [_chapter(run, name, plain, stages, names, ledger) for name, plain in stages.items()]
    return Story(run.name, run.info, pipeline, chapters)


def _chapter(
    run: RunDir,
    name: str,
    plain: Mapping[str, Any],
    stages: Mapping[str, Any],
    names: Mapping[str, Sequence[str]],
    ledger: Ledger,
) -> Chapter:
    directory = run.stage(name)
    record = directory.record()
    kind = str(plain.get("kind", ""))
    settings = validate(KINDS[kind], dict(plain))[0] if kind in KINDS else None
    links = list(_planned(name, plain.get("inputs", {}), stages))
    weights = {(link.role, link.target): link.weight for link in links}
    if record is not None:
        read = [(parent, _target(parent, names)) for parent in record.parents]
        links = [Link(p.role, to, p.record_id or "", weights.get((p.role, to), 1.0)) for p, to in read]
    return Chapter(
        name=name,
        kind=kind,
        backend=str(plain.get("backend", "")),
        links=links,
        record=record,
        formula=_formula(settings, links) if settings else "",
        settings=dict(_flat(settings.config.model_dump(mode="json", exclude_defaults=True))) if settings else {},
        decisions=list(_decisions(run, name, settings, record)) if record else [],
        curves=curves(directory),
        spent=ledger.alone(record.id) if record else {},
    )


def _target(parent: Parent, names: Mapping[str, Sequence[str]]) -> str:
    """The stage's name in this run: a checkpoint that is reused says what its parents are called where it was made."""
    told = parent.ref.removeprefix("stage:")
    here = names.get(parent.record_id or "", ())
    return told if told in here or not here else here[0]


def _planned(name: str, inputs: Mapping[str, Any], stages: Mapping[str, Any]) -> Iterator[Link]:
    """What the stage is going to read, as far as its references tell."""
    addresses, seed = Addresses(stages), unseeded(name)[1]
    for role, given in inputs.items():
        for one in given if isinstance(given, list) else [given]:
            ref, weight = (one.get("ref", ""), one.get("weight", 1.0)) if isinstance(one, dict) else (one, 1.0)
            if not ref.startswith("stage:"):
                yield from [Link(role, ref, weight=weight)] if ref else []
                continue
            try:
                found = addresses.select(ref.removeprefix("stage:"))
            except ConfigError:
                continue
            yield from (Link(role, target, weight=weight) for target in found if unseeded(target)[1] in (seed, None))


def _formula(settings: AnyStage, links: Sequence[Link]) -> str:
    if isinstance(settings.config, SftSettings):
        return SFT
    return formula(settings, [(link.role, link.target, link.weight) for link in links])


def _decisions(run: RunDir, name: str, settings: AnyStage | None, record: Record) -> Iterator[Decision]:
    outside = {found.gate: found.text for found in broken(settings.gates, record.metrics)} if settings else {}
    for gate in settings.gates if settings else ():
        yield Decision(f"gate {describe(gate)}", outside.get(gate, "passed"), gate not in outside)
    folder = run.stage(name).checkpoint
    if chosen := read_json(folder / SELECTION, "winner", "scores", "metric"):
        scores = ", ".join(f"{label} {score:.4g}" for label, score in chosen["scores"].items())
        yield Decision(f"selection by {chosen['metric']}: {scores}", f"takes {chosen['winner']}")
    if record.kind == "sample" and (report := read_json(folder / "report.json", "counts", "keep")):
        counts = report["counts"]
        yield Decision(
            f"keeps {report['keep']} answers of {counts['tries']:,} tries at {counts['prompts']:,} prompts",
            f"{counts['kept']:,} kept, {counts['solved']:,} prompts with an answer",
        )


def _flat(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from _flat(inner, f"{key}.{name}" if key else str(name))
    else:
        yield key, value
