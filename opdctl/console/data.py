"""Rows with their loss mask, and what a check of data found."""

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TypeVar

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from opdctl.console import join, plural
from opdctl.data.check import VALUES, Histogram, Judged, Report, SplitReport
from opdctl.data.rendering import Span
from opdctl.data.source import Bad, Example

if TYPE_CHECKING:  # it brings PyTorch
    from opdctl.data.mixture import Interleaving

T = TypeVar("T")
BAR = 40  # columns of the longest bar
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # text of a file must not steer the terminal


def marks() -> tuple[str, str]:
    """What stands around trained tokens, so that they are told apart without colours too."""
    unicode = (sys.stdout.encoding or "").lower() in ("utf-8", "utf8")
    return ("⟦", "⟧") if unicode else ("[[", "]]")


def legend(unit: str) -> Text:
    begin, end = marks()
    return Text.assemble(
        ("trained on", "bold green"), f": {begin}between these marks{end}; the rest is only read. Lengths in {unit}"
    )


def example_view(example: Example, spans: Sequence[Span], reference: str | None, verdict: str) -> RenderableType:
    begin, end = marks()
    text = Text()
    for span in spans:
        shown = _visible(span.text)
        text.append(f"{begin}{shown}{end}" if span.trained else shown, style="bold green" if span.trained else "")
    columns = join(f"{name}={value}" for name, value in example.prompt.columns.items())
    trained = sum(span.tokens for span in spans if span.trained)
    after = sum(span.tokens for span in spans[1:])
    lines = [
        Text.assemble((example.where, "bold"), f"  {columns}"),
        text,
        Text(f"prompt {spans[0].tokens}, completion {after}, trained on {trained}", style="dim"),
    ]
    if reference is not None:
        told = Text.assemble("reference ", (repr(reference), "cyan"), " is ")
        lines.append(told.append(verdict, style="" if verdict == "right" else "bold red"))
    return Group(*lines, "")


def bad_view(bad: Bad) -> RenderableType:
    return Group(Text.assemble((bad.where, "bold"), "  ", (bad.why, "bold red")), "")


def _visible(text: str) -> str:
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def example_data(example: Example, spans: Sequence[Span], reference: str | None, verdict: str) -> dict[str, Any]:
    return {
        "where": example.where,
        "columns": dict(example.prompt.columns),
        "spans": [asdict(span) for span in spans],
        "reference": reference,
        "verdict": verdict,
    }


# ---------------------------------------------------------------------------------------------------------- check


def report_view(report: Report, stages: Sequence["Interleaving"], note: str) -> RenderableType:
    rows = join(f"{plural(side.rows, 'row')} {split}" for split, side in _in_order(report.splits))
    parts: list[RenderableType] = [Text.assemble((report.source, "bold"), f": {rows}")]
    if note:
        parts.append(Text(note, style="yellow"))
    for split, side in _in_order(report.splits):
        for name, found in (("prompt", side.prompt), ("completion", side.completion)):
            if found is not None:
                parts += ["", _bars(f"{split}, {report.unit} of a {name}", found)]
    parts += ["", _columns(report.splits), "", _facts(report)]
    parts += [part for stage in stages for part in ("", _stage_view(stage))]
    parts += ["", *_findings(report)]
    return Group(*parts)


def _bars(title: str, found: Histogram) -> RenderableType:
    at = found.percentiles
    upto = ", ".join(f"{share} % {at[share]:,}" for share in ("50", "90", "99"))
    head = f"   mean {found.mean:.0f}, at most: {upto}, all {at['100']:,}"
    table = Table.grid(padding=(0, 1))
    for justify in ("right", "left", "right"):
        table.add_column(justify=justify, no_wrap=True)
    most = max(found.counts)
    for i, count in enumerate(found.counts):
        size = round(BAR * count / most)
        bar = "█" * max(size, 1 if count else 0)
        table.add_row(f"{found.edges[i]:,}-{found.edges[i + 1] - 1:,}", Text(bar, style="cyan"), f"{count:,}")
    return Group(Text.assemble((title, "bold"), head), table)


def _columns(splits: Mapping[str, SplitReport]) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    table.add_row(*(Text(title, style="bold") for title in ("column", "values", "rows of each")))
    for split, side in _in_order(splits):
        for name, counts in side.columns.items():
            many = side.distinct[name]
            shown = join(
                [*(f"{value} {count:,}" for value, count in list(counts.items())[:6]), "..." if many > 6 else ""]
            )
            table.add_row(f"{split} {name}", f"{many}{' or more' if many >= VALUES else ''}", shown)
    return table


def _facts(report: Report) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    for split, side in _in_order(report.splits):
        told = (
            f"{side.repeated:,} word for word, {side.repeated_nearly:,} nearly; {side.conflicting:,} with other answers"
        )
        table.add_row(Text(f"{split}, repeated prompts"), told)
    shared = f"{report.overlap:,} word for word, {report.overlap_nearly:,} nearly"
    table.add_row("eval prompts in train", f"{shared}, {report.overlap_13gram:,} more by 13 words")
    for split, judged in _in_order(report.judged):
        table.add_row(f"{split}, {judged.rows:,} judged", _judged(judged))
    for split, side in _in_order(report.splits):
        above = [f"{over:,} above {limit}" for limit, over in side.over.items() if over]
        if side.over:
            within = f"all within the limits of {join(dict.fromkeys(limit.split()[0] for limit in side.over))}"
            table.add_row(f"{split}, {report.unit}", Text("; ".join(above), style="bold red") if above else within)
    return table


def _judged(judged: Judged) -> str:
    tried = {"references": judged.full, "shuffled": judged.shuffled, "empty": judged.empty}
    shares = ", ".join(f"{name} {share:.1%}" for name, share in tried.items())
    return f"right: {shares}; always {judged.constant_answer[:30]!r} {judged.constant:.1%}"


def _in_order(splits: Mapping[str, T]) -> list[tuple[str, T]]:
    return sorted(splits.items(), reverse=True)  # train before eval


def _stage_view(stage: "Interleaving") -> RenderableType:
    table = Table.grid(padding=(0, 2))
    table.add_row(*(Text(title, style="bold") for title in (stage.by, "share", "rows of a batch", "of a step")))
    for share in stage.shares:
        batch = f"{share.fewest_of_batch} to {share.most_of_batch}"
        table.add_row(share.label, f"{share.share:.1%}", batch, f"{share.fewest} to {share.most}")
    head = f"stages.{stage.stage}: {stage.rows} prompts in each of the first {stage.steps} optimizer steps"
    run = f"; at most {stage.longest_run} of one {stage.by} in a row" if stage.shares else ""
    return Group(Text(head + run), table)


def _findings(report: Report) -> list[RenderableType]:
    if not report.findings:
        return [Text("nothing found that would spoil a run", style="green")]
    table = Table.grid(padding=(0, 1))
    for finding in report.findings:
        style = "bold red" if finding.spoils else "yellow"
        table.add_row(Text("✗" if finding.spoils else "!", style=style), Text(_visible(finding.text)))
    spoils = sum(finding.spoils for finding in report.findings)
    verdict = Text(f"{plural(spoils, 'finding')} would spoil a run", style="bold red")
    return [table, verdict if spoils else Text("nothing found that would spoil a run", style="green")]


def report_data(report: Report, stages: Sequence["Interleaving"], note: str) -> dict[str, Any]:
    return {"ok": not report.spoilt, "note": note, **asdict(report), "stages": [asdict(stage) for stage in stages]}
