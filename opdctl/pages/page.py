"""The frame of a page, and the parts that pages share. Text is escaped here; `Html` is text that is markup already."""

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

STYLE = Path(__file__).with_name("page.css")
COLOURS = (
    *("#2f86d6", "#dd7327", "#2e9e63", "#b45ac4", "#d0475a", "#7d73e0", "#a98307", "#2a9fb0", "#8c6d5a", "#7f8a95"),
    *("#e268a3", "#6f9a1f", "#4f63b8", "#c9512f"),
)


class Html(str):
    """Markup: is not escaped again."""


class Cell:
    """Of a table: its content, a note in small print, and how it is meant: good, bad, text, wrap."""

    def __init__(self, content: str, note: str = "", style: str = "", title: str = "") -> None:
        self.content, self.note, self.style, self.title = content, note, style, title

    def html(self, tag: str) -> str:
        given = (("class", self.style), ("title", self.title))
        marks = "".join(f' {key}="{escape(value)}"' for key, value in given if value)
        note = f"<small>{text(self.note)}</small>" if self.note else ""
        content = text(self.content)
        if not isinstance(self.content, Html):  # where the names of stages may be broken
            content = content.replace("[", "<wbr>[").replace("_", "_<wbr>")
        return f"<{tag}{marks}>{content}{note}</{tag}>"


def text(content: str) -> str:
    return content if isinstance(content, Html) else escape(content)


def page(title: str, parts: Iterable[str]) -> str:
    """A whole document; the parts are markup."""
    body = "\n".join(parts)
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(title)}</title>\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<style>{STYLE.read_text()}</style>\n</head>\n"
        f"<body>\n{body}\n</body>\n</html>\n"
    )


def folded(title: str, width: int = 14) -> Html:
    """A heading of a column on lines of about `width` letters."""
    lines = [""]
    for word in title.split():
        if lines[-1] and len(lines[-1]) + len(word) >= width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return Html("<br>".join(map(escape, lines)))


def heading(level: int, content: str) -> Html:
    return Html(f"<h{level}>{text(content)}</h{level}>")


def paragraph(content: str, style: str = "") -> Html:
    return Html(f'<p class="{style}">{text(content)}</p>' if style else f"<p>{text(content)}</p>")


def bullets(lines: Iterable[str]) -> Html:
    items = "".join(f"<li>{text(line)}</li>" for line in lines)
    return Html(f"<ul>{items}</ul>" if items else "")


def facts(pairs: Iterable[tuple[str, str]]) -> Html:
    rows = "".join(f"<dt>{text(name)}</dt><dd>{text(value)}</dd>" for name, value in pairs if value)
    return Html(f"<dl>{rows}</dl>")


def table(titles: Sequence[str | Cell], rows: Iterable[Sequence[str | Cell]], *, mean_last: bool = False) -> Html:
    """Scrolls sideways by itself where the screen is narrow. `mean_last`: the last row sums the others up."""

    def row(cells: Sequence[str | Cell], tag: str) -> str:
        return "".join((cell if isinstance(cell, Cell) else Cell(cell)).html(tag) for cell in cells)

    body = [row(cells, "td") for cells in rows]
    marks = ["" for _ in body]
    if mean_last and marks:
        marks[-1] = ' class="mean"'
    lines = "\n".join(f"<tr{mark}>{cells}</tr>" for mark, cells in zip(marks, body, strict=True))
    head = f"<thead><tr>{row(titles, 'th')}</tr></thead>"
    return Html(f'<div class="scroll"><table>{head}<tbody>\n{lines}\n</tbody></table></div>')


def legend(labels: Sequence[str]) -> Html:
    """Colours by position, as in `charts`."""
    marks = "".join(
        f'<span><i style="background:{COLOURS[at % len(COLOURS)]}"></i>{escape(label)}</span>'
        for at, label in enumerate(labels)
    )
    return Html(f'<div class="legend">{marks}</div>')


def details(summary: str, parts: Iterable[str]) -> Html:
    return Html(f"<details><summary>{text(summary)}</summary>{''.join(parts)}</details>")
