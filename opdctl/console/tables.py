"""Tables of stages, runs and checks, each with the plain data that `--json` prints."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from opdctl.console.metrics import duration, key_metrics
from opdctl.watchdog import Alarm

STATE_STYLES = {
    "done": "green",
    "run": "green",
    "reused": "blue",
    "running": "cyan",
    "half-trained": "yellow",
    "stopped": "yellow",
    "failed": "bold red",
    "refused": "bold red",
    "damaged": "bold red",
    "not started": "dim",
    "not run": "dim",
    "skipped": "dim",
}


@dataclass(frozen=True)
class StageLine:
    """A stage in the summary of a run, or in its status."""

    stage: str
    kind: str
    state: str
    step: int = 0
    total: int = 0  # 0: not known
    seconds: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    note: str = ""
    checkpoint: str = ""
    alarms: Sequence[Alarm] = ()  # of the watchdog, in the attempts that made its curve


def grid(*titles: str, right: Sequence[str] = ()) -> Table:
    table = Table.grid(padding=(0, 2))
    for title in titles:
        table.add_column(justify="right" if title in right else "left", no_wrap=title not in ("", "metrics", "note"))
    table.add_row(*(Text(title, style="bold") for title in titles))
    return table


def stages_table(lines: Sequence[StageLine]) -> RenderableType:
    table = grid("stage", "state", "steps", "time", "metrics", right=("steps", "time"))
    for line in lines:
        steps = f"{line.step:,}" if line.total in (0, line.step) else f"{line.step:,}/{line.total:,}"
        last = key_metrics(line.kind, line.metrics)  # more would not fit into 80 columns
        table.add_row(
            line.stage,
            Text(line.state, style=STATE_STYLES.get(line.state, "")),
            steps if line.step or line.total else "",
            "" if line.seconds is None else duration(line.seconds),
            f"{last}  {line.note}".strip() if line.note else last,
        )
    alarms = [(line.stage, alarm) for line in lines for alarm in line.alarms]
    return Group(table, "", alarms_table(alarms)) if alarms else table


def alarms_table(alarms: Sequence[tuple[str, Alarm]]) -> RenderableType:
    """Of (stage, alarm): what the watchdog told, and where to read on."""
    table = grid("stage", "alarm", "")
    for stage, alarm in alarms:
        named = Text(f"{alarm.rule} ({alarm.action})", style="yellow" if alarm.action == "warn" else "bold red")
        table.add_row(stage, named, f"at step {alarm.step}: {alarm.evidence}; {alarm.runbook}")
    return table


def stages_data(lines: Sequence[StageLine]) -> list[dict[str, Any]]:
    return [asdict(line) for line in lines]


@dataclass(frozen=True)
class RunLine:
    name: str
    pipeline: str
    created: str
    done: int
    stages: int
    busy: bool
    path: str


def runs_table(runs: Sequence[RunLine]) -> RenderableType:
    table = grid("run", "pipeline", "created", "stages done", "", right=("stages done",))
    for run in runs:
        table.add_row(
            Text(run.name, style="bold"),
            run.pipeline,
            run.created,
            f"{run.done}/{run.stages}",
            Text("running", style="cyan") if run.busy else "",
        )
    return table


@dataclass(frozen=True)
class Check:
    """One line of `opdctl doctor`."""

    topic: str
    name: str
    verdict: Literal["ok", "absent", "broken"]  # absent: not needed by what opdctl is used for here
    detail: str
    remedy: str = ""


VERDICTS = {"ok": ("✓", "green"), "absent": ("-", "dim"), "broken": ("✗", "bold red")}


def checks_view(checks: Sequence[Check]) -> RenderableType:
    table = Table.grid(padding=(0, 1))
    for no_wrap in (True, True, False):
        table.add_column(no_wrap=no_wrap)
    topic = ""
    for check in checks:
        if check.topic != topic:
            table.add_row("", Text(check.topic, style="bold"))
            topic = check.topic
        mark, style = VERDICTS[check.verdict]
        detail = Text(check.detail)
        if check.remedy and check.verdict != "ok":
            detail.append(f"\n{check.remedy}", style="" if check.verdict == "broken" else "dim")
        table.add_row(Text(mark, style=style), Text(check.name), detail)
    broken = sum(check.verdict == "broken" for check in checks)
    return Group(table, "", Text(f"{broken} broken", style="bold red") if broken else Text("all good", style="green"))


def checks_data(checks: Sequence[Check]) -> dict[str, Any]:
    return {"ok": all(check.verdict != "broken" for check in checks), "checks": [asdict(check) for check in checks]}
