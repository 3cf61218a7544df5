"""`compare` and `report` as a user calls them."""

import errno
import json
import re
import subprocess
import sys
import time

import pytest
from examined import CELLS, RIGHT, examined

SECOND = {**RIGHT, "student": (60, 50, 70)}
MANY = {**RIGHT, **{f"mopd[loss=form_number_{n}]": (70, 60, 80) for n in range(6)}}


def outside(page):
    """Addresses that a browser would ask for."""
    return re.findall(r"(?:https?:)?//[\w.-]+|@import|<link|<script|<img|<iframe", page)


@pytest.mark.parametrize("columns", [80, 120])
def test_tables_fit_the_terminal(call, workspace, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    examined(workspace, "one", right=MANY)
    code, out, _ = call("compare", "one")
    assert code == 0
    assert max(len(line) for line in out.split("\n")) <= columns
    assert out.count("number_5") >= 2
    for cell in CELLS:
        assert cell in out
    assert "…" not in out


def test_numbers_of_the_terminal_by_hand(call, workspace):
    examined(workspace, "one")
    out = call("compare")[1]
    lines = [line.split() for line in out.split("\n")]
    assert ["a.low", "0.75"] in lines
    assert ["mean", "0.83"] in lines
    (costs,) = (line for line in lines if line[:1] == ["student"] and line[-1] == "35")
    assert costs == ["student", "1,000", "10", "20", "4,000", "35"]


def test_several_runs_are_a_block_each_or_one_over_seeds(call, workspace):
    examined(workspace, "one")
    examined(workspace, "two", seed=1, right=SECOND)
    examined(workspace, "other", config={"seed": 98})
    out = call("compare", "one", "two", "other")[1]
    assert "one two, eval: 1 student, 3 cells, 2 seeds" in out
    assert "other, eval: 1 student, 3 cells, 1 seed" in out


def test_json_has_every_number(call, workspace):
    examined(workspace, "one")
    document = json.loads(call("compare", "one", "--json")[1])
    assert document.keys() == {"blocks", "notes"}
    (block,) = document["blocks"]
    assert block.keys() == {"runs", "stage", "seeds", "confidence", "cells", "students"}
    (student,) = block["students"]
    assert student.keys() == {"label", "kind", "scores", "length", "episodes", "cost", "health"}
    row = student["scores"]["accuracy"]["rows"][0]
    assert row["recovery"] == {"value": pytest.approx(0.75), "low": None, "high": None, "seeds": 1}
    assert row.keys() == {
        *("cell", "before", "teacher", "teacher_label", "best", "best_label", "after"),
        *("gain", "delta", "delta_best", "recovery"),
    }
    assert student["cost"]["all_cpu_seconds"]["value"] == 35
    assert student["health"]["reverse_kl"]["curves"]["0"]["steps"][-1] == 20


def test_the_page_holds_every_cell_and_nothing_from_outside(call, workspace):
    examined(workspace, "one", right=MANY)
    code, _, err = call("compare", "one", "--html", "pages/c.html")
    assert code == 0
    assert "wrote pages/c.html" in err
    page = (workspace / "pages" / "c.html").read_text()
    assert outside(page) == []
    for cell in CELLS:
        assert page.count(f"<td>{cell.replace('_', '_<wbr>')}</td>") == 4  # scores and recovery, of either metric
    for label in MANY.keys() - {"sft", "teacher"}:
        assert label in page
    assert "70.0<small>-10.0 ±" in page
    assert "prefers-color-scheme: dark" in page
    assert page.count("<svg") == page.count("</svg>") >= 6


def test_a_report_tells_the_whole_run(call, workspace):
    run = examined(workspace, "one", right=MANY)
    code, _, err = call("report", "one")
    assert code == 0
    page = (run.path / "report.html").read_text()
    assert str(run.path / "report.html") in err.replace("\n", "")
    assert outside(page) == []
    for told in (
        "opdctl run small",
        "2026-01-02 03:04 UTC",
        "abcdef012345",
        "id-one-teacher",
        "What each stage minimised",
    ):
        assert told in page
    for stage in run.read_pipeline()["stages"]:
        assert stage.replace("_", "_<wbr>").replace("[", "<wbr>[") in page
    assert '<g class="stage">' in page


def test_a_report_says_the_command_without_the_folder_of_the_program(call, workspace):
    run = examined(workspace, "one")
    run.write_info(**(run.info | {"argv": [str(workspace / "opdctl" / "__main__.py"), "run", "small"]}))
    call("report", "one")
    page = (run.path / "report.html").read_text()
    assert "opdctl run small" in page
    assert "__main__.py" not in page


def test_a_report_of_a_run_under_way_goes_where_it_is_told(call, workspace):
    examined(workspace, "one", unfinished=("teacher",))
    code, _, _ = call("report", "one", "--out", "r.html")
    assert code == 0
    page = (workspace / "r.html").read_text()
    assert "not started" in page
    assert "no eval stage has finished" in page


def test_a_run_with_nothing_to_compare_is_refused_with_what_to_look_at(call, workspace):
    examined(workspace, "one", unfinished=("eval",))
    code, _, err = call("compare", "one")
    assert code == 2
    assert "no eval stage has finished" in err
    assert "opdctl status one" in err


def test_an_unknown_run_is_refused(call, workspace):
    examined(workspace, "one")
    code, _, err = call("compare", "one", "onee")
    assert code == 2
    assert "did you mean one?" in err


def test_help_imports_nothing_that_takes_long():
    script = "import sys; from opdctl.cli import main\ntry: main(['compare', '--help'])\nexcept SystemExit: pass\n"
    script += "print([name for name in ('matplotlib', 'numpy', 'torch', 'rich') if name in sys.modules])"
    began = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.rstrip().endswith("[]"), done.stderr
    assert time.perf_counter() - began < 10


@pytest.mark.parametrize("command", [("compare", "one", "--html"), ("report", "one", "--out")])
def test_a_page_that_cannot_be_written_is_refused_with_its_option(call, workspace, command):
    examined(workspace, "one")
    (workspace / "file").write_text("")
    for path in (".", "file/page.html"):
        code, _, err = call(*command, path)
        assert code == 1
        assert f"error: {command[-1]}: cannot write {path}: " in err.replace("\n", " ")
        assert f"name another file: {command[-1]} FILE" in err.replace("\n", " ")


@pytest.mark.parametrize("command", [("compare", "one", "--html"), ("report", "one", "--out")])
def test_a_page_that_was_there_stays_where_the_disk_is_full(call, workspace, monkeypatch, command):
    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    examined(workspace, "one")
    pages = workspace / "pages"
    pages.mkdir()
    (pages / "page.html").write_text("old")
    monkeypatch.setattr("os.fsync", full)
    code, _, err = call(*command, "pages/page.html")
    assert code == 1
    assert f"error: {command[-1]}: cannot write pages/page.html: No space left on device" in err
    assert (
        f"free space, or move the workspace; then run the same command again; or name another file: {command[-1]}"
        in err
    )
    assert [(path.name, path.read_text()) for path in pages.iterdir()] == [("page.html", "old")]


def test_a_page_is_written_where_a_link_or_a_pipe_leads(call, workspace):
    examined(workspace, "one")
    (workspace / "link.html").symlink_to("real.html")
    assert call("report", "one", "--out", "link.html")[0] == 0
    assert (workspace / "link.html").is_symlink()
    assert "<html" in (workspace / "real.html").read_text()
    command = [sys.executable, "-m", "opdctl", "report", "one", "--out", "/dev/stdout"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, "<html" in done.stdout) == (0, True), done.stderr


@pytest.mark.parametrize("command", ["compare", "report", "status"])
def test_a_run_whose_pipeline_is_damaged_is_refused_with_the_command_that_mends_it(call, workspace, command):
    run = examined(workspace, "one")
    (run.path / "pipeline.yaml").write_text("stages: [")
    code, _, err = call(command, "one")
    assert code == 2
    assert "run one: pipeline.yaml is damaged" in err
    assert "opdctl run small" in err
