"""The stages of a run as a picture: drawn in layers, each below all that it reads.

Instances of one stage in one layer share a box. A line that passes a layer gets a place of its own in it, so that none
runs through a box (Sugiyama's method: layers, barycentres, then positions).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

from opdctl.pages.page import Html
from opdctl.references import unseeded

LETTER, DOT, ROW, PAD = 6.4, 10.0, 17.0, 10.0  # width of a letter and a dot, height of a line, space inside a box
GAP, LANE, BETWEEN = 26.0, 14.0, 54.0  # between boxes, for a line that passes, between layers
SHOWN = 6  # instances that a box names; more are counted
LONGEST = 34  # letters of a line
SWEEPS = 8
QUIET = ("before", "budget")  # roles drawn faintly: nothing is trained from them
STYLES = ("quiet", "teach", "made")
LOOKING = ("eval", "select")  # kinds that train from nothing they read


@dataclass(frozen=True)
class Item:
    """A stage."""

    name: str
    kind: str
    state: str
    told: str  # steps and time
    reads: Sequence[tuple[str, str]]  # (role, name of a stage)


@dataclass(eq=False)
class _Box:
    """A place in a layer: instances of one stage, or (without any) a line that passes."""

    layer: int
    items: list[Item] = field(default_factory=list)
    x: float = 0.0  # of the middle
    y: float = 0.0  # of the top
    tall: float = 0.0  # height of the layer

    @property
    def lines(self) -> list[tuple[str, list[str]]]:
        """Text, and a state for each dot behind it: seeds share a line."""
        first = self.items[0]
        by_name: dict[str, list[Item]] = {}
        for item in self.items:
            by_name.setdefault(unseeded(item.name)[0], []).append(item)
        if len(by_name) == 1:
            told = f"{first.kind}, {first.told}" if first.told else first.kind
            return [(_cut(next(iter(by_name))), []), (_cut(told), [item.state for item in self.items])]
        rows = [
            (_cut(f"{_axes(name)}  {items[0].told}".rstrip()), [item.state for item in items])
            for name, items in by_name.items()
        ]
        if more := rows[SHOWN:]:
            states = {state for _, listed in more for state in listed}
            rows = [*rows[:SHOWN], (f"and {len(more)} more", [states.pop() if len(states) == 1 else "differs"])]
        return [(_cut(f"{first.name.partition('[')[0]} x{len(by_name)}, {first.kind}"), []), *rows]

    @property
    def width(self) -> float:
        return (
            max(LETTER * len(text) + DOT * len(states) for text, states in self.lines) + 2 * PAD + 8
            if self.items
            else LANE
        )

    @property
    def height(self) -> float:
        return ROW * len(self.lines) + 2 * PAD - 4 if self.items else self.tall


@dataclass(frozen=True)
class _Edge:
    path: Sequence[_Box]  # from the box read, through the layers, to the reader
    role: str


def stage_graph(items: Sequence[Item]) -> Html:
    """An SVG of its natural size, to be put where it can be scrolled."""
    boxes = _boxes(items)
    layers: list[list[_Box]] = [[] for _ in range(1 + max(box.layer for box in boxes.values()))]
    for box in dict.fromkeys(boxes.values()):
        layers[box.layer].append(box)
    edges = _edges(items, boxes, layers)
    near = _neighbours(layers, edges)
    _order(layers, near)
    _place(layers, near)
    width = max(box.x + box.width / 2 for layer in layers for box in layer) + 8
    height = max(box.y + box.height for layer in layers for box in layer) + 8
    drawn = [_curve(edge) for edge in sorted(edges, key=_strength)]  # the faint ones below the others
    drawn += [_drawn(box) for layer in layers for box in layer if box.items]
    kinds = dict.fromkeys(item.kind for item in items)
    legend = "".join(f'<span><i class="k-{escape(kind)}"></i>{escape(kind)}</span>' for kind in kinds)
    size = f'width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}"'
    svg = f'<svg role="img" aria-label="stages and what they read" {size}>{"".join(drawn)}</svg>'
    return Html(f'<div class="graph">{svg}</div><div class="legend kinds">{legend}</div>')


def _boxes(items: Sequence[Item]) -> dict[str, _Box]:
    """Stage -> its box."""
    reads = {item.name: [parent for _, parent in item.reads] for item in items}
    depths: dict[str, int] = {}
    for item in items:  # each comes after all that it reads
        depths[item.name] = 1 + max((depths[parent] for parent in reads[item.name] if parent in depths), default=-1)
    shared: dict[tuple[str, int], _Box] = {}
    found: dict[str, _Box] = {}
    for item in items:
        key = (item.name.partition("[")[0], depths[item.name])
        found[item.name] = shared.setdefault(key, _Box(key[1]))
        found[item.name].items.append(item)
    return found


def _edges(items: Sequence[Item], boxes: Mapping[str, _Box], layers: list[list[_Box]]) -> list[_Edge]:
    """One for each pair of boxes; lines out of one box share their way through the layers below it."""
    wanted: dict[tuple[_Box, _Box], str] = {}
    for item in items:
        for role, parent in item.reads:
            if parent in boxes:
                pair = (boxes[parent], boxes[item.name])
                told = "before" if item.kind in LOOKING else role
                if wanted.get(pair, "before") in QUIET:
                    wanted[pair] = told
    lanes: dict[tuple[_Box, int], _Box] = {}
    edges: list[_Edge] = []
    for (start, end), role in wanted.items():
        path = [start]
        for layer in range(start.layer + 1, end.layer):
            if (start, layer) not in lanes:
                lanes[start, layer] = _Box(layer)
                layers[layer].append(lanes[start, layer])
            path.append(lanes[start, layer])
        edges.append(_Edge([*path, end], role))
    return edges


Near = Mapping[_Box, tuple[list[_Box], list[_Box]]]  # place -> those above and those below that a line joins it to


def _neighbours(layers: Sequence[list[_Box]], edges: Sequence[_Edge]) -> Near:
    found: Near = {box: ([], []) for layer in layers for box in layer}
    for edge in edges:
        for above, below in zip(edge.path, edge.path[1:], strict=False):
            found[above][1].append(below)
            found[below][0].append(above)
    return found


def _order(layers: Sequence[list[_Box]], near: Near) -> None:
    """Within each layer by the mean position of the neighbours, downwards and upwards in turn."""
    for sweep in range(SWEEPS):
        up = sweep % 2
        for layer in layers[::-1] if up else layers:
            at = {box: number / max(1, len(row) - 1) for row in layers for number, box in enumerate(row)}
            middle = {box: _mean((at[other] for other in near[box][up]), at[box]) for box in layer}
            layer.sort(key=middle.__getitem__)


def _place(layers: Sequence[list[_Box]], near: Near) -> None:
    """Each near the middle of its neighbours, none over another, all right of 0."""
    top = 4.0
    for layer in layers:
        _pack(layer, [0.0] * len(layer))
        tallest = max(box.height for box in layer)
        for box in layer:
            box.y, box.tall = top, tallest
        top += tallest + BETWEEN
    for sweep in range(4 * SWEEPS):
        for layer in layers[::-1] if sweep % 2 else layers:
            _pack(layer, [_mean((other.x for side in near[box] for other in side), box.x) for box in layer])
    left = min(box.x - box.width / 2 for layer in layers for box in layer) - 4
    for box in (box for layer in layers for box in layer):
        box.x -= left


def _pack(layer: Sequence[_Box], wanted: Sequence[float]) -> None:
    """As near to what is wanted as the order and the widths allow: the middle of packing from left and from right."""
    pairs = list(zip(layer, layer[1:], strict=False))
    steps = [(a.width + b.width) / 2 + (GAP if a.items and b.items else GAP / 2) for a, b in pairs]
    lowest, highest = list(wanted), list(wanted)
    for at, step in enumerate(steps):
        highest[at + 1] = max(highest[at + 1], highest[at] + step)
    for at, step in reversed(list(enumerate(steps))):
        lowest[at] = min(lowest[at], lowest[at + 1] - step)
    for box, low, high in zip(layer, lowest, highest, strict=True):
        box.x = (low + high) / 2


def _strength(edge: _Edge) -> int:
    """Of its line, as a number of STYLES."""
    return 0 if edge.role in QUIET else 1 if edge.role == "teachers" else 2


def _curve(edge: _Edge) -> str:
    """Down out of the box read and of its layer, straight through passed layers, into the reader."""
    start = edge.path[0]
    x, y = start.x, start.y + start.tall
    path = [f"M{x:.1f} {start.y + start.height:.1f}V{y:.1f}"]
    for box in edge.path[1:]:
        bend = (box.y - y) / 2
        path.append(f"C{x:.1f} {y + bend:.1f} {box.x:.1f} {box.y - bend:.1f} {box.x:.1f} {box.y:.1f}")
        x, y = box.x, box.y
        if not box.items:
            y += box.tall
            path.append(f"V{y:.1f}")
    style = STYLES[_strength(edge)]
    tip = f"M{x - 4:.1f} {y - 7:.1f}L{x:.1f} {y:.1f}L{x + 4:.1f} {y - 7:.1f}"
    told = f"{edge.path[0].items[0].name} to {edge.path[-1].items[0].name}"
    lines = f'<path d="{"".join(path)}"/><path class="tip" d="{tip}"/>'
    return f'<g class="edge {style}"><title>{escape(told)}</title>{lines}</g>'


def _drawn(box: _Box) -> str:
    left, kind = box.x - box.width / 2, escape(box.items[0].kind)
    names = "\n".join(f"{item.name}: {item.state}, {item.told}" for item in box.items)
    place = f'x="{left:.1f}" y="{box.y:.1f}" height="{box.height:.1f}"'
    frame = f'<rect class="frame" {place} width="{box.width:.1f}" rx="5"/>'
    frame += f'<rect class="k-{kind}" {place} width="5" rx="2"/>'
    texts = []
    for number, (line, states) in enumerate(box.lines):
        y = box.y + PAD + 8 + ROW * number
        style = ' class="name"' if number == 0 else ""
        texts.append(f'<text{style} x="{left + PAD + 4:.1f}" y="{y:.1f}">{escape(line)}</text>')
        for back, state in enumerate(reversed(states)):
            dot = f'cx="{left + box.width - PAD - DOT * back:.1f}" cy="{y - 4:.1f}" r="3.5"'
            texts.append(f'<circle class="s-{escape(state.replace(" ", "-"))}" {dot}/>')
    return f'<g class="stage"><title>{escape(names)}</title>{frame}{"".join(texts)}</g>'


def _axes(name: str) -> str:
    """`max[domain=general,round=1]` -> `general, round=1`: the name of the axis only where it is needed."""
    parts = name.partition("[")[2].rstrip("]").split(",")
    return ", ".join(part if part.startswith("round=") else part.partition("=")[2] for part in parts)


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


def _mean(values: Iterable[float], otherwise: float) -> float:
    known = list(values)
    return sum(known) / len(known) if known else otherwise
