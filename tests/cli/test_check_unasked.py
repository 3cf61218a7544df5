"""What `check` shows of questions that were not put."""

from opdctl.console import make_console
from opdctl.console.gate import gate_data, gate_view
from opdctl.verdicts import Outcome, Verdict, read_verdicts, unasked, write_verdicts

FINE = Verdict("grader", "task math", Outcome.GO, "reference answers 8 of 8 right")
UNASKED = unasked("difficulty", "task math", "the stage has no GPU of its own")


def test_a_question_that_was_not_put_is_shown_with_its_reason_and_is_not_among_what_is_in_order():
    console = make_console()
    with console.capture() as capture:
        console.print(gate_view("p", {"rl": [FINE, UNASKED]}, [], everything=False))
    shown = capture.get()
    assert "difficulty  task math: go" in shown
    assert "not asked: the stage has no GPU of its own" in shown
    assert "in order: grader 1" in shown
    assert "in order: grader 1, difficulty" not in shown
    assert [one["asked"] for one in gate_data({"rl": [FINE, UNASKED]})["stages"]["rl"]] == [True, False]


def test_it_is_written_and_read_again_and_older_files_are_read(tmp_path):
    write_verdicts(tmp_path / "gate.json", "k", [FINE, UNASKED])
    assert read_verdicts(tmp_path / "gate.json", "k") == [FINE, UNASKED]
    content = (tmp_path / "gate.json").read_text()
    (tmp_path / "gate.json").write_text(content.replace('"asked": true', '"accepted": false'))
    assert read_verdicts(tmp_path / "gate.json", "k") is not None
