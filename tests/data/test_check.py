"""What a check finds in rows that were made to hold it, and that it needs little memory for many."""

import json
import tracemalloc

import pytest

from opdctl.data.check import Limit, check, histogram
from opdctl.data.source import open_source
from opdctl.settings import ChainTask, FileTask

LONG = "the old miller of the village by the river counts his sacks of flour before noon"


def source(folder, rows, held=None, **settings):
    for name, part in (("train", rows), ("held", held or [])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    given = {"path": "train.jsonl", "prompt": "q", "answer": "a", "verifier": "numeric", "held_out": 0.0}
    apart = {"eval_path": "held.jsonl"} if held else {}
    return open_source("mine", FileTask(**given | apart | settings), None, folder, seed=0, limit=1)


def rows(*pairs):
    return [{"q": q, "a": a} for q, a in pairs]


def many(count, start=0):
    return rows(*((f"How much is {n} and {2 * n}?", 3 * n) for n in range(start, start + count)))


def texts(report, *, spoils):
    return [finding.text for finding in report.findings if finding.spoils is spoils]


def test_clean_data_has_no_findings(tmp_path):
    report = check(source(tmp_path, many(50), many(20, 100)), lengths=None)
    assert report.findings == []
    assert (report.splits["train"].rows, report.splits["eval"].rows) == (50, 20)
    judged = report.judged["train"]
    assert (judged.rows, judged.full, judged.empty) == (50, 1.0, 0.0)


def test_held_out_prompts_that_are_trained_on_spoil_a_run(tmp_path):
    held = [*many(20, 100), *rows(("how much is 7 and 14", 21), ("How much is 8 and 16?", 24))]
    report = check(source(tmp_path, many(50), held), lengths=None)
    assert (report.overlap, report.overlap_nearly) == (1, 2)
    [told] = texts(report, spoils=True)
    assert told.startswith("2 of 22 held-out prompts are trained on too, 1 word for word")
    assert f"{tmp_path}/held.jsonl, row 21" in told


def test_held_out_prompts_that_share_13_words_are_worth_a_look(tmp_path):
    train, held = (
        rows((f"{LONG} and sells 5", 1)),
        rows((f"{LONG} and sells 6", 2), ("other words", 3), ("more words", 4)),
    )
    report = check(source(tmp_path, [*many(9), *train], held), lengths=None)
    assert report.overlap_13gram == 1
    [told] = texts(report, spoils=False)
    assert told.endswith(f"{tmp_path}/held.jsonl, row 1 with {tmp_path}/train.jsonl, row 10")


def test_prompts_with_two_answers_are_named(tmp_path):
    report = check(source(tmp_path, [*many(20), *rows(("How much is 3 and 6?", 10))]), lengths=None)
    assert report.splits["train"].conflicting == 1
    [told] = texts(report, spoils=True)
    assert f"{tmp_path}/train.jsonl, row 4 and {tmp_path}/train.jsonl, row 21" in told


def test_repeats_are_counted_word_for_word_and_nearly(tmp_path):
    again = rows(("How much is 3 and 6?", 9), ("how  much is 4 and 8", 12))
    report = check(source(tmp_path, [*many(20), *again]), lengths=None)
    assert (report.splits["train"].repeated, report.splits["train"].repeated_nearly) == (1, 2)
    assert texts(report, spoils=True) == []


def test_a_verifier_that_rejects_references_or_accepts_nothing_at_all_spoils_a_run(tmp_path):
    (tmp_path / "odd.py").write_text("def lax(text, answer): return text != '9'\n")
    shown = [row | {"c": str(row["a"])} for row in many(20)]
    report = check(source(tmp_path, shown, verifier="odd:lax", completion="c"), lengths=None)
    told = texts(report, spoils=True)
    assert any("calls 5.0% of 20 reference answers wrong" in text and "'9'" in text for text in told)
    assert any("calls an empty completion right in 100.0%" in text for text in told)


def test_an_answer_that_is_right_most_of_the_time_is_the_floor(tmp_path):
    report = check(source(tmp_path, rows(*((f"q{n}", 7 if n < 60 else n) for n in range(100)))), lengths=None)
    assert report.judged["train"].constant == 0.6
    assert report.judged["train"].constant_answer == "7"
    assert ["always answering '7' is right in 60.0%" in text for text in texts(report, spoils=False)] == [True]


def test_rows_above_a_limit_spoil_a_run_where_a_stage_refuses_them(tmp_path):
    limits = [Limit("rl", "prompts", "prompt", 4, refuses=True), Limit("rl", "completions", "completion", 2, False)]
    lengths = lambda examples: ([len(e.prompt.text.split()) for e in examples], [3] * len(examples))  # noqa: E731  # short
    report = check(source(tmp_path, rows(("a b c d e", 1), ("a b", 2))), lengths=lengths, limits=limits)
    [told] = texts(report, spoils=True)
    assert told.startswith("train: 1 prompts have more than stages.rl.prompts: 4 tokens; the longest has 5: ")
    assert len(texts(report, spoils=False)) == 1


def test_columns_are_counted_and_endless_ones_are_cut(tmp_path):
    numbered = [row | {"kind": "ab"[n % 3 == 0], "id": n} for n, row in enumerate(many(90))]
    report = check(source(tmp_path, numbered, columns=["kind", "id"]), lengths=None)
    found = report.splits["train"]
    assert found.columns["kind"] == {"a": 60, "b": 30}
    assert found.distinct == {"domain": 1, "id": 50, "kind": 2}


def test_a_generated_task_is_checked_on_a_sample(tmp_path):
    task = open_source("chain", ChainTask(task="chain", domain="math"), None, tmp_path, seed=0, limit=30)
    report = check(task, lengths=None)
    assert (report.splits["train"].rows, report.splits["eval"].rows) == (30, 30)
    assert report.judged["train"].full == 1.0
    assert not report.spoilt


@pytest.mark.parametrize("lengths", [[0], [5, 5, 5], list(range(1000)), [3, 40_000]])
def test_a_histogram_counts_every_length_once(lengths):
    import numpy as np

    found = histogram(np.array(lengths))
    assert sum(found.counts) == len(lengths)
    assert len(found.edges) == len(found.counts) + 1
    for low, high, count in zip(found.edges, found.edges[1:], found.counts, strict=False):
        assert count == sum(low <= length < high for length in lengths)
    assert found.percentiles["100"] == max(lengths)


def test_memory_grows_by_tens_of_bytes_a_row(tmp_path):
    def peak(count):
        given = source(tmp_path, many(count))
        tracemalloc.start()
        check(given, lengths=None, sample=10)
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return most

    peak(100)  # imports
    assert (peak(12_000) - peak(4_000)) / 8_000 < 150


def test_what_all_rows_lack_is_told_once(tmp_path):
    report = check(source(tmp_path, many(30), answer="ans"), lengths=None)
    told = ["train: all 30 rows: no column 'ans'; it has: q, a", "there is no row to train on"]
    assert (texts(report, spoils=True), report.splits["train"].bad) == (told, 30)
    report = check(source(tmp_path, [{"q": "a"}, *many(20)]), lengths=None)
    assert texts(report, spoils=True) == [f"{tmp_path}/train.jsonl, row 1: no column 'a'; it has: q"]
