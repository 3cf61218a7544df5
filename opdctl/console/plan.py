"""A plan as a tree of stages: decision, reason and resources of each, the losses of the RL and OPD stages."""

from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from opdctl import disk, gates
from opdctl.console import join, plural
from opdctl.memory import GIB
from opdctl.plan import Decision, Plan, PlannedStage
from opdctl.references import unseeded

STYLES = {
    Decision.RUN: "yellow",
    Decision.RESUME: "cyan",
    Decision.REUSE: "green",
    Decision.REFUSED: "bold red",
    Decision.SKIPPED: "dim",
}
ALIKE = 12  # instances of one stage beyond which those with the same decision and reason share a line


def plan_view(plan: Plan) -> RenderableType:
    """The tree, then one formula for each base stage that has one."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, justify="right")
    table.add_column(no_wrap=True, style="dim")
    table.add_column(overflow="fold")
    table.add_row(*(Text(title, style="bold") for title in ("stage", "plan", "steps", "takes", "why")))
    groups: dict[str, list[PlannedStage]] = {}
    for item in plan.stages:
        groups.setdefault(item.stage.base, []).append(item)
    for base, instances in groups.items():
        _add_group(table, base, instances)
    heading = Text.assemble((plan.pipeline.settings.name, "bold"), f", run {plan.run.name}: ", summary(plan.stages))
    return Group(heading, "", table, *_disk(plan), *_pins(plan), *_formulas(plan.stages))


def _disk(plan: Plan) -> list[RenderableType]:
    found = disk.forecast(plan)
    return ["", Text(disk.describe(found), style="" if found.fits else "bold red")] if found.stages else []


def _pins(plan: Plan) -> list[RenderableType]:
    lines: list[RenderableType] = [
        Text(
            f"{ref}: " + (f"commit {commit}" if commit else "the hub was not reached to tell its commit; run needs it")
        )
        for ref, commit in plan.pins.items()
    ]
    return ["", *lines] if lines else []


def summary(stages: Iterable[PlannedStage]) -> str:
    """`14 stages: 12 run, 1 resume, 1 reuse`."""
    decisions = [item.decision for item in stages]
    counts = [f"{decisions.count(decision)} {decision}" for decision in Decision if decision in decisions]
    return f"{plural(len(decisions), 'stage')}: {join(counts)}"


def plan_data(plan: Plan) -> dict[str, Any]:
    return {
        "pipeline": plan.pipeline.settings.name,
        "source": plan.pipeline.source,
        "run": plan.run.name,
        "stages": [_stage_data(item) for item in plan.stages],
        "pins": dict(plan.pins),
        "disk": disk.data(disk.forecast(plan)),
    }


def _stage_data(item: PlannedStage) -> dict[str, Any]:
    stage = item.stage
    return {
        "name": stage.name,
        "kind": stage.settings.kind,
        "labels": dict(stage.labels),
        "decision": str(item.decision),
        "reason": item.reason,
        "resume_step": item.resume_step,
        "total_steps": item.total_steps,
        "fingerprint": item.fingerprint,
        "formula": item.formula,
        "memory_gib": None if item.memory is None else round(item.memory.peak / GIB, 2),
        "gates": [
            gate.model_dump() | {"broken": next((b.text for b in item.broken if b.gate == gate), None)}
            for gate in stage.settings.gates
        ],
        "inputs": [{"role": given.role, "kind": given.kind, "target": given.target} for given in stage.inputs],
        "resources": stage.settings.resources.model_dump(),
    }


def _add_group(table: Table, base: str, instances: Sequence[PlannedStage]) -> None:
    first = instances[0]
    if len(instances) == 1 and first.stage.name == base:
        table.add_row(Text(base, style="bold"), *_cells(first))
        return
    table.add_row(Text.assemble((base, "bold"), (f" x{len(instances)}", "dim")))
    lines: dict[tuple[str, ...], list[PlannedStage]] = {}
    for item in instances:
        alike = (item.decision, _why(item)) if len(instances) > ALIKE else (item.stage.name,)
        lines.setdefault(alike, []).append(item)
    for at, items in enumerate(lines.values()):
        branch = "└ " if at == len(lines) - 1 else "├ "
        more = f" and {len(items) - 1:,} more" if len(items) > 1 else ""
        table.add_row(Text.assemble((branch, "dim"), _axes(items[0].stage.name), (more, "dim")), *_cells(items[0]))


def _axes(name: str) -> str:
    return name.partition("[")[2].rstrip("]") or name


def _cells(item: PlannedStage) -> tuple[RenderableType, ...]:
    steps = f"{item.total_steps:,}"
    if item.decision is Decision.RESUME and item.resume_step is not None:
        steps = f"{item.resume_step:,}/{steps}"
    resources = item.stage.settings.resources
    gpus = plural(resources.gpus, "gpu") if resources.gpus else ""
    peak = item.memory.peak / GIB if item.memory else 0.0
    takes = join((plural(resources.cpus, "cpu"), gpus, f"{peak:.1f} GiB" if peak >= 1 else ""))
    return Text(item.decision, style=STYLES[item.decision]), steps, takes, _why(item)


def _why(item: PlannedStage) -> str:
    """The reason for the decision, then the gates; of a finished stage those that it did not pass."""
    told = [f"{found.text} ({found.action})" for found in item.broken]
    if item.decision in (Decision.RUN, Decision.RESUME):
        told = [gates.describe(gate) for gate in item.stage.settings.gates]
    return join((item.reason, *(f"gate: {text}" for text in told)), "; ")


def _formulas(stages: Iterable[PlannedStage]) -> list[RenderableType]:
    """Each loss once, with the stages that minimise it, and each way to merge; further lines of the formula by stage
    where they differ."""
    everyone = [unseeded(item.stage.name)[0] for item in stages]
    losses: dict[str, dict[str, list[str]]] = {}  # first line -> further lines -> stages
    for item in stages:
        if item.formula:
            first, _, more = item.formula.partition("\n")
            first = f"{'weights' if item.stage.settings.kind == 'merge' else 'loss'}: {first}"
            losses.setdefault(first, {}).setdefault(more, []).append(unseeded(item.stage.name)[0])
    lines: list[RenderableType] = []
    for first, further in losses.items():
        users = [name for names in further.values() for name in names]
        lines += ["", Text(join(_by_base(users, everyone)), style="bold"), _indented(first)]
        for more, names in further.items():
            owner = f"{join(_by_base(names, everyone))}: " if len(further) > 1 else ""
            lines += [_indented(owner + line) for line in more.splitlines()]
    return lines


def _indented(text: str) -> RenderableType:
    return Padding(Text(text), (0, 0, 0, 2))


def _by_base(names: Sequence[str], everyone: Sequence[str]) -> list[str]:
    """`max`, `high` where all instances are meant, full names where only some are."""
    titles: list[str] = []
    for base in dict.fromkeys(name.partition("[")[0] for name in names):
        listed = [name for name in names if name.partition("[")[0] == base]
        whole = len(listed) == sum(name.partition("[")[0] == base for name in everyone)
        titles += [base] if whole else dict.fromkeys(listed)
    return titles
