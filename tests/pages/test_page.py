"""The frame of a page: what it escapes, and that it asks nothing of anybody."""

from opdctl.pages.charts import Line, Point, curves, dots, scatter
from opdctl.pages.page import Cell, Html, page, table


def test_text_is_escaped_and_markup_is_not():
    made = page("a < b", [table(["<i>"], [[Cell("x & y", note="<", title='"')], [Html("<b>z</b>")]])])
    assert "<title>a &lt; b</title>" in made
    assert "<th>&lt;i&gt;</th>" in made
    assert '<td title="&quot;">x &amp; y<small>&lt;</small></td>' in made
    assert "<td><b>z</b></td>" in made


def test_pictures_are_inline_with_names_of_their_own_and_no_address():
    lines = {"a": [Line([1, 2], [0.1, 0.2]), Line([1, 2], [0.2, 0.4])], "b & c": [Line([1], [1.0])]}
    points = {"a": Point(0.5, 0.4, 0.6), "b & c": Point(0.1)}
    colours = {"a": 0, "b & c": 1}
    pictures = [
        curves("loss & more", lines, colours),
        dots("score", points, colours, (0.0, 1.0)),
        scatter("cost", {name: (3.0, point) for name, point in points.items()}, colours, "tokens"),
    ]
    for picture in pictures:
        assert picture.count("<svg") == 1
        assert "http" not in picture
        assert "xmlns" not in picture
        assert "currentColor" in picture
        assert "#010203" not in picture
    names = [{part.split('"')[0] for part in picture.split(' id="')[1:]} for picture in pictures]
    assert all(names)
    assert not names[0] & names[1]
    assert 'aria-label="loss &amp; more"' in pictures[0]


def test_a_label_in_a_picture_is_text_whatever_stands_in_it():
    label = "</svg><script>$x_{$ & y"
    picture = dots("score", {label: Point(0.5)}, {label: 0})
    assert "<script" not in picture
    assert "&lt;script&gt;$x_{$ &amp; y" in picture.replace("\n", "")
