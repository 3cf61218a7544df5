"""What is shown: progress, plans, tables, lineage and the fusion table, at the width and height of a real terminal."""

import io
import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from opdctl.backends.contract import Event
from opdctl.console import error_data, print_error, print_json
from opdctl.console.fusion import report_view
from opdctl.console.keep import sweep_view
from opdctl.console.lineage import lineage_data, lineage_mermaid, lineage_tree
from opdctl.console.live import LiveProgress, PlainProgress, Row, short_name, visible
from opdctl.console.metrics import clock, duration, key_metrics, number
from opdctl.console.tables import Check, StageLine, checks_data, checks_view, stages_table
from opdctl.engine.scores import CellCounts, fusion_tables
from opdctl.errors import ConfigError, OpdctlError
from opdctl.garbage import Found, Sweep
from opdctl.lineage import Edge, Node

STAGES = {
    "sft": "sft",
    **{f"{base}[domain={d}]": "rlvr" for base in ("max", "high", "low") for d in ("general", "general_agents", "code")},
    **{f"mopd[loss={loss}]": "opd" for loss in ("policy_gradient", "topk", "full_vocab")},
    "eval": "eval",
}


def terminal(width=80, height=24, color=True):
    return Console(
        file=io.StringIO(),
        width=width,
        height=height,
        force_terminal=True,
        color_system="standard" if color else None,
        markup=False,
        highlight=False,
        emoji=False,
    )


def render(renderable, **size):
    console = terminal(**size)
    console.print(renderable)
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", console.file.getvalue())


def a_record(step=900, **metrics):
    return SimpleNamespace(step=step, metrics=metrics)


class Clock:
    now = 1_000_000.0

    def __call__(self):
        return self.now


# ------------------------------------------------------------------------------------------------ progress


def busy_display(**size):
    ticks = Clock()
    display = LiveProgress(STAGES, terminal(**size), ticks)
    display.started("sft", 1)
    display.progress("sft", Event(900, 900, {"loss": 0.1234}, time=ticks.now))
    ticks.now += 32
    display.finished("sft", a_record(loss=0.1234))
    display.reused("max[domain=general]", "same settings as run a")
    for stage, step in (("max[domain=general_agents]", 40), ("max[domain=code]", 30)):
        display.started(stage, 1)
        metrics = {"reward": -0.1234567, "length": 10.94, "tokens_per_s": 21_345.0}
        display.progress(stage, Event(0, 120, metrics, time=ticks.now))
        display.progress(stage, Event(step, 120, metrics, time=ticks.now + 10))
    ticks.now += 10
    display.failed("max[domain=code]", "loss is nan at step 30", "tail")
    return display


def test_the_live_display_shows_every_stage_within_80_columns():
    text = render(busy_display(), height=30)
    lines = text.rstrip("\n").split("\n")
    assert max(map(len, lines)) <= 80
    assert len(lines) == len(STAGES) + 1
    assert "2/14 stages" in lines[-1]


def test_a_running_row_shows_step_metrics_throughput_and_time_left():
    (line,) = (line for line in render(busy_display()).split("\n") if "max[general_agents]" in line)
    for part in ("40/120", "reward -0.123", "len 10.9", "21.3k/s", "-0:20"):
        assert part in line


def test_warnings_are_printed_and_mark_the_row_and_a_paused_stage_runs_no_longer():
    display = busy_display()
    display.warned("max[domain=general_agents]", "watchdog: truncated at step 40")
    (line,) = (line for line in render(display).split("\n") if "max[general_agents]" in line)
    assert line.startswith("! ")
    assert "watchdog: truncated at step 40" in display.console.file.getvalue()
    display.paused("max[domain=general_agents]", "watchdog: entropy; paused at step 40")
    (line,) = (line for line in render(display).split("\n") if "max[general_agents]" in line)
    assert line.startswith("= ")
    assert "-0:20" not in line
    assert "watchdog: entropy; paused at step 40" in display.console.file.getvalue()


@pytest.mark.parametrize("height", [6, 10, 13, 24])
def test_the_live_display_never_exceeds_the_terminal_height(height):
    display = busy_display(height=height)
    lines = render(display, height=height).rstrip("\n").split("\n")
    assert len(lines) < height
    assert any("max[general_agents]" in line for line in lines), "what runs stays visible"


def test_finished_rows_give_way_before_waiting_ones():
    rows = [Row(f"s{i}", "sft", "done") for i in range(5)] + [Row("r", "sft", "running"), Row("w", "sft", "waiting")]
    shown, before, after = visible(rows, 5)
    assert [row.stage for row in shown] == ["s4", "r", "w"]
    assert (before, after) == ("4 finished", "")


def test_a_thousand_stages_collapse_to_what_runs():
    rows = [Row(f"s{i}", "sft", "waiting") for i in range(1000)]
    rows[500].state = "running"
    shown, before, after = visible(rows, 20)
    assert len(shown) == 18
    assert rows[500] in shown
    assert (before, after) == ("", "982 waiting")


def test_plain_progress_prints_a_start_an_end_and_a_line_every_five_seconds():
    ticks, console = Clock(), terminal(color=False)
    display = PlainProgress(STAGES, console, ticks)
    display.started("sft", 2)
    for step in range(1, 121):
        ticks.now += 0.125
        display.progress("sft", Event(step, 120, {"loss": 1 / step, "tokens_per_s": 500.0}, time=ticks.now))
    display.finished("sft", a_record(step=120, loss=0.01))
    lines = console.file.getvalue().rstrip("\n").split("\n")
    assert lines[0] == "sft: started, attempt 2"
    assert [line.split(",")[0] for line in lines[1:-1]] == ["sft: 40/120", "sft: 80/120", "sft: 120/120"]
    assert lines[1].endswith("500/s, 0:10 left")
    assert lines[-1] == "sft: done, 120 steps in 15 s, loss 0.010"


def test_a_long_refusal_takes_one_line_among_the_others_and_is_kept_whole_for_the_end():
    console = terminal(color=False)
    display = PlainProgress(STAGES, console, Clock())
    display.failed("sft", "1 of 3 checks refuses:\n  routing: 4 rows", "")
    assert console.file.getvalue() == "sft: failed: 1 of 3 checks refuses: ...\n"
    assert display.failures[0].message == "1 of 3 checks refuses:\n  routing: 4 rows"


def test_time_left_is_measured_from_the_start_of_the_attempt():
    row = Row("sft", "sft", "running")
    row.progress(Event(800, 900, {}, time=100.0), 100.0)  # resumed: the first 799 steps took no time here
    row.progress(Event(810, 900, {}, time=105.0), 105.0)
    assert row.eta_s(105.0) == pytest.approx(45.0)


def test_time_left_shrinks_while_events_tell_of_the_same_step():
    row = Row("eval", "eval", "running")
    for step, at in ((0, 10.0), (1, 70.0), (1, 80.0), (1, 100.0)):
        row.progress(Event(step, 3, {}, phase=f"student {at}", time=at), at)
    assert row.eta_s(100.0) == pytest.approx(90.0)  # two models of a minute each, half of one of them done


def test_an_event_without_a_time_counts_as_seen_now():
    row = Row("sft", "sft", "running")
    row.progress(Event(0, 10, {}), 100.0)
    row.progress(Event(5, 10, {}), 105.0)
    assert row.eta_s(105.0) == pytest.approx(5.0)


def test_failures_are_kept_for_the_end():
    display = busy_display()
    assert [(f.stage, f.message, f.log_tail) for f in display.failures] == [
        ("max[domain=code]", "loss is nan at step 30", "tail")
    ]


def test_short_names_keep_the_axis_values():
    assert short_name("sft") == "sft"
    assert short_name("x[domain=general,effort=low]") == "x[general,low]"


# ------------------------------------------------------------------------------------------------ numbers


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0.000"),
        (0.01234, "0.012"),
        (6.123, "6.12"),
        (61.23, "61.2"),
        (612.3, "612"),
        (61234, "61k"),
        (-0.5, "-0.500"),
    ],
)
def test_numbers_take_few_characters(value, text):
    assert number(value) == text


def test_tiny_and_huge_numbers_keep_their_size():
    assert number(2.5e-5) == "2.5e-05"
    assert number(3.2e7) == "3.2e+07"


def test_times():
    assert [clock(s) for s in (7, 760, 11_100)] == ["0:07", "12:40", "3:05:00"]
    assert [duration(s) for s in (0.83, 32, 760, 11_100)] == ["0.8 s", "32 s", "12 min 40 s", "3 h 5 min"]


def test_key_metrics_name_what_a_kind_is_judged_by():
    assert key_metrics("rlvr", {"loss": 1.0, "length": 6.125, "reward": 0.5}) == "reward 0.500 len 6.12"
    assert key_metrics("opd", {"loss": 1.0}) == ""


# ------------------------------------------------------------------------------------------------ tables, errors


def test_the_stage_table_fits_80_columns_and_names_whole_addresses():
    metrics = {"reward": 0.987, "length": 10.5, "truncated": 0.0}
    lines = [StageLine("high[domain=general_agents]", "rlvr", "done", 240, 240, 123.4, metrics)]
    lines += [StageLine("low[domain=general_agents]", "rlvr", "half-trained", 120, 240, note="a long note " * 5)]
    text = render(stages_table(lines))
    assert max(len(line) for line in text.split("\n")) <= 80
    assert "high[domain=general_agents]" in text
    assert "120/240" in text


def test_checks_show_the_remedy_of_what_is_broken():
    checks = [
        Check("installed", "python", "ok", "3.11", "not shown"),
        Check("installed", "torch", "broken", "not installed", "pip install torch"),
    ]
    text = render(checks_view(checks))
    assert "pip install torch" in text
    assert "not shown" not in text
    assert checks_data(checks)["ok"] is False


def test_errors_name_every_problem_and_the_hint(capsys):
    print_error(ConfigError(["stages.a: x", "stages.b: y"], hint="mend [both]"))
    text = capsys.readouterr().err
    assert text == "2 errors:\n  stages.a: x\n  stages.b: y\nhint: mend [both]\n"
    assert error_data(OpdctlError("boom", hint="h")) == {
        "error": "boom",
        "problems": ["boom"],
        "hint": "h",
        "exit_code": 1,
    }


def test_errors_are_red_when_colour_is_forced(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    print_error(OpdctlError("boom"))
    assert "\x1b[" in capsys.readouterr().err


def test_json_is_strict_even_for_numbers_that_are_not_finite(capsys):
    print_json({"a": float("nan"), "b": (1.5, float("inf")), "c": {"d": "é"}})
    assert json.loads(capsys.readouterr().out) == {"a": None, "b": [1.5, None], "c": {"d": "é"}}


# ------------------------------------------------------------------------------------------------ lineage

NODES = {
    "m": Node("m", "mopd", "r", "opd", 80, 12.0, parents=[Edge("student", "s", ""), Edge("teachers", "t", "")]),
    "t": Node(
        "t", "max[domain=general]", "r", "rlvr", 120, 9.0, parents=[Edge("init", "s", ""), Edge("budget", "s", "")]
    ),
    "s": Node("s", "sft", "r", "sft", 900, 30.0, {}, parents=[Edge("init", "model:", "")]),
    "model:": Node("model:", "new model"),
}


def test_the_lineage_tree_draws_a_shared_ancestor_once():
    (tree,) = lineage_tree(NODES, ["m"])
    text = render(tree)
    assert text.count("new model") == 1
    assert text.count("sft") >= 3
    assert text.count("(above)") == 2
    assert "teachers: max[domain=general]" in text


def test_lineage_as_mermaid_has_every_edge_once():
    text = lineage_mermaid(NODES)
    assert text.startswith("flowchart TD\n")
    assert text.count("-->") == 5
    assert 'n1["max[domain=general]<br/>rlvr, step 120"]' in text


def test_lineage_as_mermaid_names_the_checks_that_were_accepted():
    node = replace(NODES["m"], accepted=["distance", "origin"])
    assert '"mopd<br/>opd, step 80, accepted: distance, origin"' in lineage_mermaid({"m": replace(node, parents=[])})


def test_lineage_as_data_names_roots_and_parents():
    data = lineage_data(NODES, ["m"])
    assert data["roots"] == ["m"]
    assert data["checkpoints"]["s"]["parents"] == [{"role": "init", "parent": "model:", "label": ""}]


# ------------------------------------------------------------------------------------------------ fusion


@pytest.fixture
def report():
    """As `engine/eval.py` publishes it: two cells, two teachers, three students."""
    cells = ["general_agents.high", "general_agents.max"]

    def scored(low, high):
        parts = zip(cells, (low, high), (4, 9), strict=True)
        return {cell: CellCounts(300, right, right - 1, 300 * length, 0) for cell, right, length in parts}

    teachers = {"low[domain=general_agents]": scored(290, 100), "max[domain=general_agents]": scored(120, 295)}
    students = {f"mopd[loss={loss}]": scored(259, 296) for loss in ("policy_gradient", "topk", "full_vocab")}
    models = {"sft": scored(150, 200), **teachers, **students}
    routes = dict(zip(cells, teachers, strict=True))
    tables = fusion_tables(models["sft"], teachers, students, routes)
    return {
        "cells": cells,
        "confidence": 0.95,
        "roles": {"sft": "before"},
        "models": {
            label: {cell: {**vars(counts), "length_mean": counts.mean_length} for cell, counts in of.items()}
            for label, of in models.items()
        },
        "fusion": [table.as_json() for table in tables],
        "normalised_score": {f"{student}/accuracy": 0.987 for student in students},
    }


def test_the_fusion_table_of_three_students_fits_80_columns(report):
    text = render(report_view("eval", report))
    assert max(len(line) for line in text.split("\n")) <= 80
    row = next(line for line in text.split("\n") if line.startswith("general_agents.high"))
    assert row.split()[:4] == ["general_agents.high", "50.0", "96.7", "86.3"]
    assert re.search(r"-10\.3±\d\.\d", row)
    assert "accuracy within the budget" in text
    assert "normalised score" in text
    assert "…" not in text, "nothing is cut"


def test_a_wide_fusion_table_shows_whole_intervals(report):
    text = render(report_view("eval", report), width=140)
    assert re.search(r"86\.3 -10\.3 \[-\d+\.\d,  -\d\.\d\]", text)


def test_mean_lengths_are_given_by_effort(report):
    lines = render(report_view("eval", report)).rstrip().split("\n")
    assert lines[-2].split() == ["high", "4.00", "4.00", "4.00", "4.00", "4.00"]
    assert lines[-1].split() == ["max", "9.00", "9.00", "9.00", "9.00", "9.00"]


def test_turns_and_valid_calls_are_given_for_the_cells_that_have_them(report):
    assert "turns" not in render(report_view("eval", report))
    played = {"turns": 4.789, "valid_calls": 0.9712}
    for cells in report["models"].values():
        cells["general_agents.max"]["episodes"] = played
    text = render(report_view("eval", report))
    assert max(len(line) for line in text.split("\n")) <= 80
    assert text.rstrip().split("\n")[-1].split() == ["general_agents.max", *["4.79", "97.1"] * 5]


def test_without_a_student_before_models_are_listed(report):
    text = render(report_view("eval", report | {"fusion": [], "normalised_score": {}, "roles": {}}))
    assert "sft" in text
    assert "58.3" in text  # (150 + 200) / 600


def test_what_gc_says_of_long_names_leaves_room_for_the_reason_in_80_columns():
    path = Path("runs/first/stages/high/domain=general_agents/checkpoints/20261130T174949-7cedbbaa1b83")
    found = Found("checkpoint", path, "first", "high[domain=general_agents]", ("in force", "an ancestor"), 610_000)
    text = render(sweep_view(Sweep((), (found,), (), 0), deleted=False, again=""))
    assert "in force (and 1 more)" in text
    assert "20261130T174949-7cedbbaa1b83" in text
    assert max(map(len, text.splitlines())) <= 80
