"""`opdctl report`: one run for a person who was not there."""

import json
import shlex
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path

from opdctl.comparison import Comparison
from opdctl.console import join, plural
from opdctl.console.metrics import UNITS, amount, duration, key_metrics
from opdctl.console.tables import StageLine
from opdctl.pages.charts import curves, smoothed
from opdctl.pages.compare import block_parts
from opdctl.pages.graph import Item, stage_graph
from opdctl.pages.page import Cell, Html, bullets, details, facts, heading, legend, page, paragraph, table, text
from opdctl.story import Chapter, Story

EPISODES = {"turns": "turns of an episode", "valid_calls": "valid calls of tools, share"}
LEARNING = {  # kind -> metric -> caption
    "sft": {"loss": "loss"},
    "rlvr": {"reward": "reward", "accuracy": "accuracy", "length": "length, tokens", "entropy": "entropy"} | EPISODES,
    "opd": {"reverse_kl": "reverse KL, per token", "accuracy": "accuracy", "length": "length, tokens"} | EPISODES,
}
MOST = 10  # lines of a chart, as many as there are colours
LONG = 60  # letters of a value that is shown whole


def report_page(story: Story, lines: Sequence[StageLine], comparison: Comparison) -> str:
    """One self-contained document. `lines`: the state of each stage; `comparison`: of this run alone."""
    parts: list[Html] = [
        heading(1, f"Run {story.run}"),
        _summary(story, lines),
        heading(2, "Stages"),
        paragraph(
            "Each stage stands below what it reads. Dashed: as teachers; faint: to be measured. A dot for each seed.",
            "dim",
        ),
        stage_graph(_items(story, lines)),
        _stages(story, lines),
    ]
    parts += _decisions(story)
    parts += _alarms(lines)
    parts.append(heading(2, "What each stage minimised"))
    parts += _formulas(story)
    parts.append(heading(2, "Learning"))
    parts.append(paragraph("By optimizer step, averaged over a moving tenth of the steps.", "dim"))
    parts += _learning(story)
    parts += [heading(2, "Results"), bullets(comparison.notes)]
    for block in comparison.blocks:
        parts += block_parts(block)
    parts += [heading(2, "Where it came from"), _lineage(story)]
    return page(f"Run {story.run} of {story.pipeline.get('name', '')}", parts)


def _summary(story: Story, lines: Sequence[StageLine]) -> Html:
    done = sum(line.state in ("done", "reused") for line in lines)
    records = [chapter.record for chapter in story.chapters if chapter.record]
    own = [record for record in records if record.run == story.run]
    seeds = story.pipeline.get("seeds") or [story.pipeline.get("seed", 0)]
    codes = dict.fromkeys(record.code[:12] for record in records if record.code)
    versions = dict.fromkeys(record.opdctl_version for record in records)
    spent = sum(chapter.spent.get("cpu_seconds") or 0.0 for chapter in story.chapters)
    return facts(
        [
            ("pipeline", f"{story.pipeline.get('name', '')}, from {story.info.get('source', '')}"),
            ("stages", f"{done} of {plural(len(lines), 'stage')} done, {len(records) - len(own)} made by other runs"),
            ("started", _when(str(story.info.get("created", "")))),
            ("last stage finished", _when(max((record.created for record in own), default=""))),
            ("seed", ", ".join(map(str, seeds))),
            ("CPU time told by its stages", duration(spent) if spent else ""),
            ("opdctl", join([", ".join(versions), f"commit {', '.join(codes)}" if codes else ""])),
            ("command", _command([str(word) for word in story.info.get("argv", ())])),
        ]
    )


def _command(argv: Sequence[str]) -> str:
    """As a user types it: where the program lies is of no interest to a reader elsewhere."""
    names = [Path(word).name for word in argv[:1]]
    return shlex.join([*("opdctl" if name == "__main__.py" else name for name in names), *argv[1:]])


def _when(created: str) -> str:
    try:
        return f"{datetime.fromisoformat(created):%Y-%m-%d %H:%M %Z}"
    except ValueError:
        return created


def _items(story: Story, lines: Sequence[StageLine]) -> list[Item]:
    states = {line.stage: line for line in lines}
    return [
        Item(
            name=chapter.name,
            kind=chapter.kind,
            state=states[chapter.name].state,
            told=_told(states[chapter.name]),
            reads=[(link.role, link.target) for link in chapter.links],
        )
        for chapter in story.chapters
    ]


def _told(line: StageLine) -> str:
    steps = f"{line.step:,} {UNITS.get(line.kind, 'steps')}" if line.step else ""
    return join([steps, duration(line.seconds) if line.seconds is not None else ""])


def _stages(story: Story, lines: Sequence[StageLine]) -> Html:
    titles: list[str | Cell] = ["stage", *(Cell(title, style="text") for title in ("kind", "backend", "state"))]
    titles += ["steps", "wall time", "CPU seconds", "tokens sampled"]
    rows: list[list[str | Cell]] = []
    for chapter, line in zip(story.chapters, lines, strict=True):
        spent = [chapter.spent.get(name) for name in ("cpu_seconds", "sampled_tokens")]
        style = {"done": "", "reused": "", "failed": " bad", "damaged": " bad"}.get(line.state, " dim")
        rows.append(
            [
                chapter.name,
                Cell(chapter.kind, style="text"),
                Cell(chapter.backend, style="text"),
                Cell(line.state, style=f"text{style}"),
                amount(line.step) if line.step else "",
                duration(line.seconds) if line.seconds is not None else "",
                *("-" if value is None else amount(value) for value in spent),
                Cell(join([key_metrics(line.kind, line.metrics), line.note]), style="wrap"),
            ]
        )
    return table([*titles, Cell("at the end", style="text")], rows)


def _decisions(story: Story) -> Iterator[Html]:
    rows: list[list[str | Cell]] = [
        [
            chapter.name,
            Cell(found.what, style="wrap"),
            Cell(found.outcome, style="wrap" if found.passed else "wrap bad"),
        ]
        for chapter in story.chapters
        for found in chapter.decisions
    ]
    if rows:
        yield heading(2, "Decisions")
        yield table(["stage", Cell("what", style="text"), Cell("outcome", style="text")], rows)


def _alarms(lines: Sequence[StageLine]) -> Iterator[Html]:
    rows: list[list[str | Cell]] = [
        [
            line.stage,
            Cell(f"{alarm.rule} ({alarm.action})", style="text"),
            f"{alarm.step:,}",
            Cell(alarm.evidence, style="wrap" if alarm.action == "warn" else "wrap bad"),
            Cell(f"{'; '.join(alarm.causes)}; see {alarm.runbook}", style="wrap"),
        ]
        for line in lines
        for alarm in line.alarms
    ]
    if rows:
        yield heading(2, "Alarms of the watchdog")
        titles: list[str | Cell] = ["stage", Cell("rule", style="text"), "step"]
        yield table([*titles, Cell("what was seen", style="text"), Cell("likely causes", style="text")], rows)


def _bases(story: Story) -> dict[str, list[Chapter]]:
    found: dict[str, list[Chapter]] = {}
    for chapter in story.chapters:
        found.setdefault(chapter.base, []).append(chapter)
    return found


def _formulas(story: Story) -> Iterator[Html]:
    """Once for all instances that share it; settings that are not defaults are folded away."""
    for base, chapters in _bases(story).items():
        count = f" x{len(chapters)}" if len(chapters) > 1 else ""
        yield heading(3, base + count + (f", {chapters[0].kind}" if chapters[0].kind != base else ""))
        formulas: dict[str, list[str]] = {}
        for chapter in chapters:
            formulas.setdefault(chapter.formula, []).append(chapter.name)
        for formula, names in formulas.items():
            if len(formulas) > 1:
                yield paragraph(", ".join(names), "dim")
            yield Html(f"<pre>{text(formula or 'trains nothing')}</pre>")
        rows: list[list[str | Cell]] = [[key, Cell(value, style="wrap")] for key, value in _settings(chapters)]
        if rows:
            yield details("settings that are not defaults", [table(["config.", Cell("value", style="text")], rows)])


def _settings(chapters: Sequence[Chapter]) -> Iterator[tuple[str, str]]:
    """Values in which instances differ stand one after another."""
    for key in dict.fromkeys(key for chapter in chapters for key in chapter.settings):
        values = dict.fromkeys(
            json.dumps(chapter.settings[key]) if key in chapter.settings else "default" for chapter in chapters
        )
        shown = " | ".join(values)
        yield key, shown if len(shown) <= 4 * LONG else f"{shown[: 4 * LONG]}..."


def _learning(story: Story) -> Iterator[Html]:
    for base, chapters in _bases(story).items():
        drawn: list[Html] = []
        shown = [chapter for chapter in chapters if chapter.curves][:MOST]
        colours = {chapter.name: at for at, chapter in enumerate(shown)}
        for metric, caption in LEARNING.get(chapters[0].kind, {}).items():
            series = {c.name: [smoothed(c.curves[metric])] for c in shown if metric in c.curves}
            if series:
                drawn.append(curves(caption, series, colours))
        if drawn:
            yield heading(3, base)
            left_out = len([chapter for chapter in chapters if chapter.curves]) - len(shown)
            yield legend(list(colours))
            if left_out:
                yield paragraph(f"and {left_out} more, not drawn", "dim")
            yield Html(f'<div class="charts">{"".join(drawn)}</div>')


def _lineage(story: Story) -> Html:
    """Records by id: what `opdctl lineage` follows."""
    rows: list[list[str | Cell]] = []
    for chapter in story.chapters:
        record = chapter.record
        if record is None:
            continue
        parents = {role: [link.target for link in chapter.links if link.role == role] for role in _roles(chapter)}
        read = Cell("; ".join(f"{role}: {', '.join(names)}" for role, names in parents.items()), style="wrap")
        made = "" if record.run == story.run else f"run {record.run}: {record.stage}"
        rows.append([chapter.name, Cell(record.id, style="text"), _when(record.created), record.code[:12], made, read])
    titles: list[str | Cell] = ["stage", Cell("record", style="text"), "published", "code", "made by"]
    titles.append(Cell("read", style="text"))
    return details("records, code and parents of every stage", [table(titles, rows)])


def _roles(chapter: Chapter) -> list[str]:
    return list(dict.fromkeys(link.role for link in chapter.links))
