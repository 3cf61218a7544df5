"""The table of a grader beside the verifier."""

import io

import pytest
from rich.console import Console

from opdctl.console.fusion import report_view


def rate(value, low, high):
    return {"value": value, "low": low, "high": high}


def graded(**changes):
    return {
        "right": 60,
        "wrong": 40,
        "verdicts": 100,
        "unparsed": 0,
        "score": 0.625,
        "agreement": rate(0.94, 0.875, 0.972),
        "false_accept_rate": rate(0.1, 0.04, 0.23),
        "false_reject_rate": rate(0.033, 0.01, 0.11),
    } | changes


@pytest.fixture
def report():
    counts = {"n": 100, "correct": 60, "within": None, "truncated": 0, "length_mean": 9.0}
    cells = {
        "general_agents.max": {**counts, "grader": graded()},
        "coding_agents.max": {**counts, "grader": None},
    }
    never_right = {**counts, "grader": graded(right=0, wrong=100, unparsed=7, false_reject_rate=None)}
    return {
        "cells": list(cells),
        "confidence": 0.95,
        "models": {"sft": cells, "teacher": {**cells, "general_agents.max": never_right}},
        "fusion": [],
    }


def render(report, width=80):
    console = Console(file=io.StringIO(), width=width)
    console.print(report_view("eval", report))
    return [line.split() for line in console.file.getvalue().split("\n")]


def test_every_graded_cell_of_every_model_has_a_line(report):
    lines = [line for line in render(report) if line and line[0] == "general_agents.max"]
    first, second = lines
    assert first == ["general_agents.max", "sft", "94.0±6.5", "10.0±13.0", "3.3±7.7", "0.0", "0.625"]
    assert second == [
        "general_agents.max",
        "teacher",
        "94.0±6.5",
        "10.0±13.0",
        "7.0",
        "0.625",
    ]  # no right one to reject
    assert not any(line[:1] == ["coding_agents.max"] for line in render(report))


def test_it_fits_80_columns(report):
    console = Console(file=io.StringIO(), width=80)
    console.print(report_view("eval", report))
    assert max(map(len, console.file.getvalue().split("\n"))) <= 80
    assert "false" in console.file.getvalue()


def test_without_a_grader_nothing_is_said_of_one(report):
    for cells in report["models"].values():
        for cell in cells.values():
            cell.pop("grader", None)  # as stages of before published it
    assert not any("grader" in line for line in render(report))
