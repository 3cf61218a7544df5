"""The picture of the stages: layers, shared boxes, and that no line runs through a box and no box over another."""

import re

from hypothesis import given, settings
from hypothesis import strategies as st

from opdctl.pages.graph import Item, stage_graph


def item(name, *reads, kind="rlvr", state="done"):
    return Item(name, kind, state, "4 steps", [("init", parent) for parent in reads])


def frames(svg):
    """(left, top, right, bottom) of each box, in the order drawn."""
    found = re.findall(r'class="frame" x="([\d.]+)" y="([\d.]+)" height="([\d.]+)" width="([\d.]+)"', svg)
    return [(x, y, x + w, y + h) for x, y, h, w in (map(float, part) for part in found)]


def points(svg):
    """Of every line, close to each other."""
    for path in re.findall(r'<path d="(M[^"]+)"/><path class="tip"', svg):
        x = y = 0.0
        for command, rest in re.findall(r"([MCV])([^MCV]+)", path):
            numbers = [float(number) for number in rest.split()]
            if command == "M":
                x, y = numbers
            elif command == "V":
                yield from ((x, y + (numbers[0] - y) * part / 20) for part in range(21))
                y = numbers[0]
            else:
                xs, ys = [x, *numbers[0::2]], [y, *numbers[1::2]]
                yield from ((bezier(xs, part / 20), bezier(ys, part / 20)) for part in range(21))
                x, y = xs[-1], ys[-1]


def bezier(ends, t):
    return sum(
        end * weight
        for end, weight in zip(ends, ((1 - t) ** 3, 3 * t * (1 - t) ** 2, 3 * t * t * (1 - t), t**3), strict=True)
    )


def test_a_stage_stands_below_what_it_reads_and_instances_share_a_box():
    both = [item("max[d=a]", "sft"), item("max[d=b]", "sft")]
    svg = stage_graph([item("sft"), *both, item("out", "max[d=a]", "max[d=b]")])
    boxes = frames(svg)
    assert len(boxes) == 3
    assert boxes[0][3] < boxes[1][1] < boxes[1][3] < boxes[2][1]
    assert svg.count('class="edge made"') == 2
    assert "max x2, rlvr" in svg
    assert "a  4 steps" in svg


def test_instances_in_different_layers_have_boxes_of_their_own():
    svg = stage_graph([item("t[round=1]"), item("s[round=1]", "t[round=1]"), item("t[round=2]", "s[round=1]")])
    assert len(frames(svg)) == 3


def test_many_instances_are_counted():
    svg = stage_graph([item(f"max[d={n}]") for n in range(9)])
    assert "max x9, rlvr" in svg
    assert "and 3 more" in svg


def test_evaluations_are_read_faintly_and_teachers_dashed():
    distilled = Item("opd", "opd", "done", "", [("teachers", "sft")])
    svg = stage_graph([item("sft"), distilled, Item("eval", "eval", "done", "", [("teachers", "opd")])])
    assert svg.count('class="edge teach"') == 1
    assert svg.count('class="edge quiet"') == 1


@st.composite
def graphs(draw):
    names = [f"s{draw(st.integers(0, 9))}[d={n}]" for n in range(draw(st.integers(1, 14)))]
    nothing = st.just(set())
    read = [draw(st.sets(st.sampled_from(names[:at]), max_size=4) if at else nothing) for at in range(len(names))]
    return [item(name, *sorted(parents)) for name, parents in zip(names, read, strict=True)]


@settings(max_examples=60)
@given(graphs())
def test_no_box_lies_over_another_and_no_line_through_a_box(items):
    svg = stage_graph(items)
    boxes = frames(svg)
    assert 0 < len(boxes) <= len(items)
    for at, (left, top, right, bottom) in enumerate(boxes):
        for other in boxes[at + 1 :]:
            assert other[2] <= left or right <= other[0] or other[3] <= top or bottom <= other[1]
        assert not [at for at in points(svg) if left + 1 < at[0] < right - 1 and top + 1 < at[1] < bottom - 1]
    width, height = map(float, re.search(r'viewBox="0 0 (\d+) (\d+)"', svg).groups())
    assert all(left >= 0 and right <= width and bottom <= height for left, _, right, bottom in boxes)
