"""Plots as inline SVG: drawn by matplotlib, in colours that follow the page's light or dark."""

import io
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from html import escape
from itertools import count
from typing import TYPE_CHECKING, Any

from opdctl.comparison import Curve
from opdctl.pages.page import COLOURS, Html, text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK = "#010203"  # stands for the page's text colour while matplotlib draws
_numbers = count()


@dataclass(frozen=True)
class Line:
    xs: Sequence[float]
    ys: Sequence[float]


@dataclass(frozen=True)
class Point:
    """A value with its interval, where it has one."""

    value: float
    low: float | None = None
    high: float | None = None


def smoothed(curve: Curve) -> Line:
    smooth = curve.smooth()
    return Line(smooth.steps, smooth.values)


def curves(caption: str, series: Mapping[str, Sequence[Line]], colours: Mapping[str, int]) -> Html:
    """A line for each label, faint ones for each seed where there are several. `colours`: label -> position."""

    def draw(axes: "Axes") -> None:
        for label, lines in series.items():
            colour = COLOURS[colours[label] % len(COLOURS)]
            for line in lines if len(lines) > 1 else ():
                axes.plot(line.xs, line.ys, color=colour, linewidth=0.7, alpha=0.35)
            middle = _mean(lines)
            marker = "o" if len(middle.xs) == 1 else None
            axes.plot(middle.xs, middle.ys, color=colour, linewidth=1.7, marker=marker, markersize=4)

    return figure(caption, draw, (3.9, 2.5))


def dots(caption: str, points: Mapping[str, Point], colours: Mapping[str, int], marks: Sequence[float] = ()) -> Html:
    """A row for each label: value and interval. `marks`: vertical lines."""

    def draw(axes: "Axes") -> None:
        for mark in marks:
            axes.axvline(mark, color=INK, linewidth=0.8, alpha=0.35)
        for at, (label, point) in enumerate(points.items()):
            colour = COLOURS[colours[label] % len(COLOURS)]
            if point.low is not None and point.high is not None:
                axes.plot([point.low, point.high], [at, at], color=colour, linewidth=2.2, alpha=0.6)
            axes.plot([point.value], [at], color=colour, marker="o", markersize=6, linestyle="none")
        axes.set_yticks(range(len(points)), [_folded(label) for label in points])
        axes.set_ylim(len(points) - 0.5, -0.5)

    return figure(caption, draw, (3.9, max(1.4, 0.75 + 0.36 * len(points))))


def scatter(caption: str, points: Mapping[str, tuple[float, Point]], colours: Mapping[str, int], xlabel: str) -> Html:
    """Score beside cost: label -> (x, value with interval)."""
    from matplotlib.ticker import EngFormatter

    def draw(axes: "Axes") -> None:
        for label, (x, point) in points.items():
            colour = COLOURS[colours[label] % len(COLOURS)]
            if point.low is not None and point.high is not None:
                axes.plot([x, x], [point.low, point.high], color=colour, linewidth=1.6, alpha=0.5)
            axes.plot([x], [point.value], color=colour, marker="o", markersize=6, linestyle="none")
        axes.set_xlabel(xlabel)
        most = max(x for x, _ in points.values())
        axes.set_xlim(0, 1.12 * most or 1)
        if most >= 10_000:
            axes.xaxis.set_major_formatter(EngFormatter(sep=""))

    return figure(caption, draw, (3.9, 2.5))


def figure(caption: str, draw: Callable[["Axes"], None], inches: tuple[float, float]) -> Html:
    with _style():
        from matplotlib.figure import Figure

        canvas = Figure(figsize=inches, layout="constrained")
        axes = canvas.add_subplot()
        draw(axes)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        stream = io.StringIO()
        metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        canvas.savefig(stream, format="svg", transparent=True, metadata=metadata)
    return Html(f"<figure><figcaption>{text(caption)}</figcaption>{_inline(stream.getvalue(), caption)}</figure>")


def _mean(lines: Sequence[Line]) -> Line:
    """Over the seeds, at the steps that all of them have."""
    known = [dict(zip(line.xs, line.ys, strict=True)) for line in lines]
    shared = [x for x in lines[0].xs if all(x in by_step for by_step in known)]
    return Line(shared, [sum(by_step[x] for by_step in known) / len(known) for x in shared])


def _folded(label: str) -> str:
    return label if len(label) <= 18 else label.replace("[", "\n[", 1)


def _style() -> AbstractContextManager[None]:
    import matplotlib

    rules: Any = {"svg.fonttype": "none", "font.size": 9, "axes.grid": True, "grid.alpha": 0.15, "axes.axisbelow": True}
    rules["text.parse_math"] = False  # a label may have two $
    inked = ("axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color", "text.color", "grid.color")
    return matplotlib.rc_context(rules | dict.fromkeys(inked, INK))


def _inline(svg: str, caption: str) -> str:
    """Into the page: no prolog, no addresses of namespaces, names of its own, the page's text colour and font."""
    body = svg[svg.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    body = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", body)
    body = body.replace("xlink:href", "href").replace(INK, "currentColor")
    body = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font-size: \1; font-family: inherit", body)
    prefix = f"c{next(_numbers)}-"
    body = re.sub(r'\bid="', f'id="{prefix}', body)
    body = re.sub(r'href="#', f'href="#{prefix}', body).replace("url(#", f"url(#{prefix}")
    return body.replace("<svg", f'<svg role="img" aria-label="{escape(caption)}"', 1)
