"""The declared pipeline: from a plain tree to stage instances that are checked and in order."""

import heapq
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any, get_args

from opdctl.checks import check_stage, computed_gpus
from opdctl.checks_inputs import check_sources, mixture, route_columns
from opdctl.errors import ConfigError
from opdctl.fields import NAME, NAME_PATTERN
from opdctl.references import (
    ROUND,
    SEED,
    Addresses,
    Input,
    Place,
    Problem,
    Resolver,
    add_axis,
    address,
    check_foreach,
    fan_out,
    near_miss,
)
from opdctl.secrets import REFERENCE, conceal
from opdctl.settings import AnyStage, Foreach, PipelineSettings
from opdctl.templates import InstanceOverride, apply, fill
from opdctl.validation import REQUIRED, validate

IN_THE_LOG = (
    "has a secret in it, and verl prints its whole configuration into the log: export it as the environment variable "
    "that the library reads (HF_TOKEN, WANDB_API_KEY, ...), and leave it out here"
)
KINDS: Mapping[str, type[AnyStage]] = {
    get_args(kind.model_fields["kind"].annotation)[0]: kind for kind in get_args(AnyStage)
}

LONGEST = 240  # characters of an instance's axes: a folder is called so, and seed=NUMBER may be added


@dataclass(frozen=True)
class Stage:
    """One instance of a stage, after the fan-out."""

    name: str  # "sft", "max[domain=general]"; axes in the order of `foreach`
    base: str
    labels: Mapping[str, str]  # the fan-out's values, then `labels:`
    settings: AnyStage  # with `tasks` and `efforts` of the pipeline filled in
    inputs: tuple[Input, ...]
    seed: int

    def upstream(self) -> frozenset[str]:
        """Names of the stages it reads."""
        return frozenset(given.target for given in self.inputs if given.kind == "stage")


@dataclass(frozen=True)
class Pipeline:
    settings: PipelineSettings
    stages: Mapping[str, Stage]  # each after all that it reads; else in the order of the file
    resolved: Mapping[str, Any]  # the whole of it as plain data, stages by instance
    source: str  # where it was read
    folder: Path  # the workspace: relative paths in it start here


@dataclass
class _Draft:
    """An instance on its way to a `Stage`."""

    name: str
    base: str
    each: Mapping[str, Any]
    tree: Any
    settings: AnyStage | None = None
    inputs: tuple[Input, ...] = ()

    @property
    def labels(self) -> dict[str, str]:
        own = self.settings.labels if self.settings else {}
        return {axis: str(value) for axis, value in self.each.items()} | own


@dataclass
class _Problems:
    """Collected for the whole pipeline; what all instances of a stage share is told once."""

    lines: dict[tuple[str, str], list[str]] = field(default_factory=dict)  # (base, text) -> instances; base "": as is
    unknown: set[str] = field(default_factory=set)  # stages whose instances cannot be told

    def add(self, text: str) -> None:
        self.lines.setdefault(("", text), [])

    def add_all(self, draft: _Draft, problems: Iterator[Problem] | Sequence[Problem]) -> None:
        for key, text in problems:
            line = f".{key}: {text}" if key else f": {text}"
            self.lines.setdefault((draft.base, line), []).append(draft.name)

    def raise_any(self, drafts: Sequence[_Draft]) -> None:
        texts: list[str] = []
        for (base, line), names in self.lines.items():
            everyone = [draft.name for draft in drafts if draft.base == base] if base else []
            owners = [base] if set(everyone) == set(names) else dict.fromkeys(names)
            texts += [f"stages.{owner}{line}" for owner in owners] if base else [line]
        if texts:
            raise ConfigError(texts)


def expand(
    tree: Mapping[str, Any],
    instance_overrides: Sequence[InstanceOverride] = (),
    *,
    source: str = "",
    folder: Path = Path(),
    problems: Sequence[str] = (),
) -> Pipeline:
    """A composed tree to a pipeline. Stages may hold `marker`s and `Late` values; `problems` are those known already.

    Raises ConfigError with every problem of the whole pipeline.
    """
    found = _Problems()
    for text in problems:
        found.add(text)
    top = conceal({key: value for key, value in tree.items() if key != "stages"})
    settings, defects = validate(PipelineSettings, top)
    for key, text in defects:
        found.add(f"{key}: {text}")
    drafts = list(_instances(tree.get("stages"), settings, found))
    addresses = Addresses(draft.name for draft in drafts)
    _override(drafts, addresses, instance_overrides, found, settings)
    for draft in drafts:
        draft.tree = conceal(draft.tree, f"stages.{draft.name}")
        draft.settings = _validated(draft, found)
    if settings is not None:
        _connect(drafts, addresses, settings, found)
        _check_seeds(drafts, settings, found)
    found.raise_any(drafts)
    assert settings is not None
    stages = {draft.name: _stage(draft, settings) for draft in drafts}
    if settings.seeds:
        stages = {made.name: made for stage in stages.values() for made in _over_seeds(stage, settings.seeds)}
    ordered = {name: stages[name] for name in _order(stages)}
    resolved = settings.model_dump(mode="json") | {"stages": {name: _plain(stage) for name, stage in ordered.items()}}
    return Pipeline(settings, ordered, resolved, source, folder)


# ---------------------------------------------------------------------------------------------- instances


def _instances(stages: Any, settings: PipelineSettings | None, found: _Problems) -> Iterator[_Draft]:
    if not isinstance(stages, dict) or not stages:
        found.add("stages: required, and not set: a pipeline needs at least one stage")
        return
    for base, template in stages.items():
        if not re.fullmatch(NAME_PATTERN, str(base)):
            found.add(f"stages.{base}: '{base}' is no name: use {NAME}")
        elif not isinstance(template, dict):
            found.add(f"stages.{base}: must be a mapping, not {template!r}")
            found.unknown.add(str(base))
        else:
            body = {key: value for key, value in template.items() if key != "foreach"}
            for each in _combinations(base, template.get("foreach"), settings, found):
                draft = _Draft(address(base, each), base, each, None)
                if len(draft.name) > len(base) + len("[]") + LONGEST:
                    found.add(f"stages.{draft.name}: its axes name a folder: shorten them to {LONGEST} characters")
                defects: list[Problem] = []
                draft.tree = fill(body, each, "", defects)
                found.add_all(draft, defects)
                yield draft


def _combinations(base: str, foreach: Any, settings: PipelineSettings | None, found: _Problems) -> list[dict[str, Any]]:
    if foreach is None:
        return [{}]
    short = isinstance(foreach, dict) and not foreach.keys() & {"product", "zip"}
    axes, defects = validate(Foreach, {"product": foreach} if short else foreach)
    if axes is not None:
        defects += check_foreach(axes, settings.axes if settings else {})
    else:
        defects = [(f"foreach.{key.removeprefix('product.') if short else key}", text) for key, text in defects]
    for key, text in defects:
        found.add(f"stages.{base}.{key}: {text}")
        found.unknown.add(base)
    return fan_out(axes) if axes is not None and not defects else []


def _override(
    drafts: Sequence[_Draft],
    addresses: Addresses,
    overrides: Sequence[InstanceOverride],
    found: _Problems,
    settings: PipelineSettings | None,
) -> None:
    by_name = {draft.name: draft for draft in drafts}
    for override in overrides:
        if override.selector.partition("[")[0] in found.unknown:
            continue
        try:
            names = addresses.select(override.selector)
        except ConfigError as error:
            one_seed = settings is not None and settings.seeds and f"{SEED}=" in override.selector
            why = "the seeds of a stage share its settings; leave the seed out" if one_seed else error
            found.add(f"override {override.text}: {why}")
            continue
        for name in names:
            defects: list[Problem] = []
            value = fill(override.value, by_name[name].each, ".".join(override.path), defects)
            found.add_all(by_name[name], defects)
            if text := apply(override, by_name[name].tree, value):
                found.add(f"override {override.text}: {text}")


def _validated(draft: _Draft, found: _Problems) -> AnyStage | None:
    tree: dict[str, Any] = draft.tree
    for name in ("tasks", "efforts"):
        if name in tree:
            found.add_all(
                draft, [(name, "unknown key: tasks and efforts are defined once, at the top of the pipeline")]
            )
    kind = tree.get("kind")
    if kind is None or kind == "???":
        found.add_all(
            draft, [("kind", f"{REQUIRED} ({', '.join(KINDS)}; or defaults: /stage@stages.{draft.base}: KIND)")]
        )
        return None
    if kind not in KINDS:
        found.add_all(draft, [("kind", f"'{kind}' is no kind of stage" + near_miss(kind, KINDS, "kinds"))])
        return None
    settings, defects = validate(KINDS[kind], tree)
    if REFERENCE.search(json.dumps(tree.get("verl"))):
        defects.append(("verl", IN_THE_LOG))
    if both := sorted(draft.each.keys() & (settings.labels.keys() if settings else set())):
        defects.append((f"labels.{both[0]}", "is an axis of foreach, so it has a value already"))
    found.add_all(draft, defects)
    return settings


# ---------------------------------------------------------------------------------------------- graph


def _connect(drafts: Sequence[_Draft], addresses: Addresses, settings: PipelineSettings, found: _Problems) -> None:
    labels = {draft.name: draft.labels for draft in drafts}
    resolver = Resolver(settings.model, addresses, labels, frozenset(found.unknown))
    invalid = {draft.name for draft in drafts if draft.settings is None}
    sources = {draft.name: draft.settings for draft in drafts if draft.settings is not None}
    resolved: list[_Draft] = []
    rounds: dict[str, list[Any]] = {}
    for draft in drafts:
        if ROUND in draft.each and draft.each[ROUND] not in (known := rounds.setdefault(draft.base, [])):
            known.append(draft.each[ROUND])
    for draft in drafts:
        if draft.settings is None:
            continue
        columns = route_columns(draft.settings, settings)
        place = Place(draft.each, rounds.get(draft.base, []))
        draft.inputs, defects = resolver.resolve(draft.settings.kind, draft.settings.inputs, columns, place)
        found.add_all(draft, defects)
        if not defects and not found.unknown and not invalid & {given.target for given in draft.inputs}:
            resolved.append(draft)
    read = {draft.name: draft.inputs for draft in resolved}
    for draft in resolved:
        assert draft.settings is not None
        found.add_all(draft, check_stage(draft.settings, draft.inputs, settings))
        found.add_all(draft, check_sources(draft.settings, draft.inputs, sources, read))
    graph = {draft.name: {given.target for given in draft.inputs if given.kind == "stage"} for draft in drafts}
    for name in [name for name, reads in graph.items() if name in reads]:
        found.add(f"stages.{name}.inputs: the stage reads itself")
        graph[name].discard(name)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        found.add(f"stages: they read each other in a circle: {' <- '.join(reversed(error.args[1]))}")


def _order(stages: Mapping[str, Stage]) -> Iterator[str]:
    """Each stage after all that it reads; among those that could come next, the first of the file."""
    number = {name: at for at, name in enumerate(stages)}
    names = list(stages)
    waits = {name: len(stage.upstream()) for name, stage in stages.items()}
    children: dict[str, list[str]] = {name: [] for name in stages}
    for name, stage in stages.items():
        for parent in stage.upstream():
            children[parent].append(name)
    ready = [number[name] for name, count in waits.items() if count == 0]
    heapq.heapify(ready)
    while ready:
        name = names[heapq.heappop(ready)]
        yield name
        for child in children[name]:
            waits[child] -= 1
            if waits[child] == 0:
                heapq.heappush(ready, number[child])


def _stage(draft: _Draft, settings: PipelineSettings) -> Stage:
    assert draft.settings is not None
    own = draft.settings
    data = mixture(own)
    tasks = {name: settings.tasks[name] for name in dict.fromkeys(data.tasks if data else ())}
    seed = own.seed if own.seed is not None else settings.seed
    resources = own.resources.model_copy(update={"gpus": computed_gpus(own, draft.inputs, settings)})
    ours = {key: getattr(own, key) or getattr(settings, key) for key in ("gate", "retry", "retention")}
    ours["watch"] = settings.watch.with_own(own.watch)
    filled = own.model_copy(update={"tasks": tasks, "efforts": settings.efforts, "resources": resources} | ours)
    return Stage(draft.name, draft.base, draft.labels, filled, draft.inputs, seed)


# ---------------------------------------------------------------------------------------------- seeds


def _check_seeds(drafts: Sequence[_Draft], settings: PipelineSettings, found: _Problems) -> None:
    """What stands in the way of running the pipeline once for each seed."""
    if not settings.seeds:
        return
    if "seed" in settings.model_fields_set:
        found.add(f"seed: {settings.seed}, and seeds stands in its place: leave one of them out")
    if len(set(settings.seeds)) < len(settings.seeds):
        found.add(f"seeds: {settings.seeds} has a seed twice")
    for draft in drafts:
        if draft.settings is not None and draft.settings.seed is not None:
            found.add_all(draft, [("seed", f"{draft.settings.seed}, and seeds gives the stage one: leave it out")])
        if SEED in draft.labels:
            found.add_all(draft, [("", f"'{SEED}' is an axis or a label of it already, and seeds adds that axis")])


def _over_seeds(stage: Stage, seeds: Sequence[int]) -> Iterator[Stage]:
    """The stage for each seed, reading the stages of the same seed.

    Of stages that are checked and resolved, so that routing, references and fan-out see the pipeline of one seed, and
    an identity is that of the pipeline with `seed: N`.
    """
    for seed in seeds:
        inputs = [
            replace(given, target=add_axis(given.target, SEED, seed)) if given.kind == "stage" else given
            for given in stage.inputs
        ]
        yield replace(
            stage,
            name=add_axis(stage.name, SEED, seed),
            labels={**stage.labels, SEED: str(seed)},
            settings=stage.settings.model_copy(update={"seed": seed}),
            inputs=tuple(inputs),
            seed=seed,
        )


def _plain(stage: Stage) -> dict[str, Any]:
    return stage.settings.model_dump(mode="json", exclude={"tasks", "efforts"}) | {"labels": dict(stage.labels)}
