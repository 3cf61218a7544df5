import hashlib
import json
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from opdctl.errors import ConfigError, StageFailed
from opdctl.settings import ChainTask, EffortSettings, FileTask
from opdctl.tasks import load_task
from opdctl.tasks.files import FileRows, data_digest
from opdctl.tasks.verifiers import check_references

ROWS = [{"question": f"What is {n} + {n}?", "result": 2 * n, "level": "easy" if n < 50 else "hard"} for n in range(100)]
TOKENS = EffortSettings(by="control_token", levels={"low": "/low", "max": "/max"})
SYSTEM = EffortSettings(by="system_prompt", levels={"low": "Be brief.", "max": ""})
TALK = [
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hi. What is it?"},
    {"role": "user", "content": "1 + 1?"},
]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def task(folder, rows=ROWS, efforts=None, file="rows.jsonl", **settings):
    path = folder / file
    if rows is not None:
        write(path, rows)
    defaults = {"path": str(path), "prompt": "question", "answer": "result", "verifier": "numeric"}
    return FileRows("sums", FileTask(**defaults | settings), efforts)


def texts(prompts):
    return [prompt.text for prompt in prompts]


# ---------------------------------------------------------------------------------------------------------- rows


def test_a_row_becomes_a_prompt_that_its_answer_satisfies(tmp_path):
    rows = task(tmp_path, columns=["level"])
    (prompt,) = rows.prompts("train", 0, 3, 1)
    number = int(prompt.text.split()[2])
    assert prompt.text == ROWS[number]["question"]
    assert prompt.columns == {"domain": "sums", "level": ROWS[number]["level"]}
    assert not prompt.messages
    assert rows.verify(prompt, f"It is {2 * number}").correct
    assert not rows.verify(prompt, f"It is {2 * number + 1}").correct
    assert check_references(rows, 50) == []


def test_parquet_gives_the_same_rows_as_jsonl(tmp_path):
    pq.write_table(pa.Table.from_pylist([row | {"unused": 1} for row in ROWS]), tmp_path / "rows.parquet")
    one = task(tmp_path, columns=["level"])
    other = task(tmp_path, rows=None, file="rows.parquet", columns=["level"])
    assert one.prompts("train", 5, 0, 200) == other.prompts("train", 5, 0, 200)


def test_parquet_holds_conversations_too(tmp_path):
    pq.write_table(pa.Table.from_pylist([{"question": TALK, "result": "2"}] * 3), tmp_path / "rows.parquet")
    rows = task(tmp_path, rows=None, file="rows.parquet", template="chat", held_out=0.0)
    assert rows.prompts("train", 0, 0, 1)[0].messages == TALK


def test_blank_lines_a_byte_order_mark_and_odd_line_separators_are_read(tmp_path):
    (tmp_path / "rows.jsonl").write_bytes(
        b'\xef\xbb\xbf{"question": "a\xe2\x80\xa8b", "result": "1"}\r\n\n{"question": "c", "result": 2.5}\n'
    )
    rows = task(tmp_path, rows=None, held_out=0.0)
    assert sorted(texts(rows.prompts("train", 0, 0, 2))) == ["a\u2028b", "c"]
    assert [prompt.answer.number for prompt in rows.prompts("train", 0, 0, 2)] in ([1, 3], [3, 1])


def test_demonstrations_imitate_the_completion_or_else_the_answer(tmp_path):
    rows = [row | {"shown": f"Thinking... {row['result']}"} for row in ROWS]
    for column, expected in [("shown", "Thinking... {}"), (None, "{}")]:
        shown = task(tmp_path, rows, TOKENS, completion=column).demonstrations(0, 0, 20, ["low", "max"])
        assert [d.completion for d in shown] == [expected.format(d.prompt.answer.answer) for d in shown]
        assert [d.prompt.columns["effort"] for d in shown] == ["low", "max"] * 10


def test_a_regex_reference_is_the_completion_since_a_pattern_need_not_match_itself(tmp_path):
    rows = [{"question": f"q{n}", "result": r"\d+", "shown": "12"} for n in range(9)]
    assert check_references(task(tmp_path, rows, verifier="regex", completion="shown", held_out=0), 9) == []
    without = task(tmp_path, rows, verifier="regex", held_out=0)
    assert without.reference(without.prompts("train", 0, 0, 1)[0]) is None
    assert check_references(without, 9) == []


# ------------------------------------------------------------------------------------------------------- streams


def test_any_slicing_of_a_stream_gives_the_same_rows(tmp_path):
    whole = task(tmp_path).prompts("train", 7, 0, 400)
    for start, count in [(0, 1), (85, 20), (270, 130)]:
        assert task(tmp_path).prompts("train", 7, start, count) == whole[start : start + count]


def test_every_epoch_holds_every_row_once_in_another_order(tmp_path):
    rows = task(tmp_path)
    n = rows.size("train")
    first, second = (texts(rows.prompts("train", 0, epoch * n, n)) for epoch in (0, 1))
    assert sorted(first) == sorted(second)
    assert len(set(first)) == n
    assert first != second
    assert first != texts(rows.prompts("train", 1, 0, n))


def test_evaluation_is_in_file_order_whatever_the_seed(tmp_path):
    rows = task(tmp_path)
    n = rows.size("eval")
    assert 0 < n < 40
    held = rows.prompts("eval", 0, 0, n)
    assert [p.answer.number for p in held] == sorted(p.answer.number for p in held)
    assert rows.prompts("eval", 1, 0, n) == held


def test_more_evaluation_prompts_than_rows_are_refused_with_both_numbers(tmp_path):
    rows = task(tmp_path)
    n = rows.size("eval")
    with pytest.raises(ConfigError, match=f"{n + 1} prompts are wanted for evaluation, and there are {n}") as caught:
        rows.prompts("eval", 0, n, 1)
    assert "rollout.prompts" in caught.value.hint


def test_rows_of_a_batch_are_groups_of_their_own(tmp_path):
    rows = task(tmp_path)
    assert len({p.group for p in rows.prompts("train", 0, 0, 200)}) == 200


# --------------------------------------------------------------------------------------------------------- split


def test_copies_of_a_prompt_stay_on_one_side(tmp_path):
    rows = [{"question": f"{pad}What  is{pad} {n}?{pad}", "result": n} for n in range(60) for pad in (" ", "\t", "\n ")]
    split = task(tmp_path, rows, held_out=0.4)
    seen = {
        side: {" ".join(text.split()) for text in texts(split.prompts(side, 0, 0, split.size(side)))}
        for side in ("train", "eval")
    }
    assert not seen["train"] & seen["eval"]
    assert len(seen["train"]) + len(seen["eval"]) == 60
    assert split.size("train") + split.size("eval") == 180


def test_adding_rows_moves_none_to_the_other_side(tmp_path):
    few, many = task(tmp_path, ROWS[:50]), task(tmp_path, ROWS)
    held = set(texts(many.prompts("eval", 0, 0, many.size("eval"))))
    assert {row["question"] for row in ROWS[:50]} & held == set(texts(few.prompts("eval", 0, 0, few.size("eval"))))


def test_a_file_of_its_own_for_evaluation_holds_nothing_out(tmp_path):
    held = write(tmp_path / "held.jsonl", ROWS[80:])
    rows = task(tmp_path, ROWS[:80], eval_path=str(held))
    assert (rows.size("train"), rows.size("eval")) == (80, 20)


def test_prompts_in_both_files_are_refused_with_their_rows(tmp_path):
    held = write(tmp_path / "held.jsonl", [ROWS[90], {"question": " What is 3  + 3?", "result": 6}, ROWS[4]])
    with pytest.raises(ConfigError, match="eval_path: 2 of 3 prompts are in `path` too.*: 4 and 2, 5 and 3") as caught:
        task(tmp_path, ROWS[:80], eval_path=str(held))
    assert "remove them" in caught.value.hint


def test_a_split_that_leaves_nothing_to_train_on_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"tasks.sums.held_out: 1.0 keeps all 100 rows") as caught:
        task(tmp_path, held_out=1.0)
    assert "lower held_out" in caught.value.hint


# -------------------------------------------------------------------------------------------- efforts and system


def test_a_control_token_follows_the_prompt(tmp_path):
    (prompt,) = task(tmp_path, efforts=TOKENS).prompts("train", 0, 0, 1, "low")
    assert prompt.text == f"{prompt.answer.text} /low"
    assert prompt.columns == {"domain": "sums", "effort": "low"}


def test_a_control_token_follows_the_last_user_turn_of_a_chat(tmp_path):
    rows = [{"question": TALK, "result": 2}]
    (prompt,) = task(tmp_path, rows, TOKENS, template="chat", held_out=0).prompts("train", 0, 0, 1, "max")
    assert prompt.text == "1 + 1? /max"
    assert prompt.messages == [*TALK[:2], {"role": "user", "content": "1 + 1? /max"}]


@pytest.mark.parametrize(
    ("own", "fixed", "effort", "system"),
    [
        (None, "", None, None),
        (None, "", "low", "Be brief."),
        (None, "You add.", "low", "You add.\n\nBe brief."),
        (None, "You add.", "max", "You add."),
        ("You multiply.", "", "low", "You multiply.\n\nBe brief."),
        ("You multiply.", "", None, "You multiply."),
    ],
)
def test_system_prompts_of_the_row_the_task_and_the_effort_become_one(tmp_path, own, fixed, effort, system):
    turns = [{"role": "system", "content": own}] * bool(own) + TALK
    rows = [{"question": turns, "result": 2}]
    (prompt,) = task(tmp_path, rows, SYSTEM, template="chat", system=fixed, held_out=0).prompts(
        "train", 0, 0, 1, effort
    )
    expected = [{"role": "system", "content": system}] * bool(system) + TALK
    assert prompt.messages == expected


def test_plain_text_becomes_the_users_turn_of_a_chat(tmp_path):
    (prompt,) = task(tmp_path, template="chat", system="You add.").prompts("train", 0, 0, 1)
    assert prompt.messages == [{"role": "system", "content": "You add."}, {"role": "user", "content": prompt.text}]


def test_an_unknown_effort_is_refused_with_the_known_ones(tmp_path):
    with pytest.raises(ConfigError, match="'medium' is asked for; known levels: low, max"):
        task(tmp_path, efforts=TOKENS).prompts("train", 0, 0, 1, "medium")


# ---------------------------------------------------------------------------------------------------- bad inputs


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "tasks.sums.path: .*rows.jsonl holds no rows"),
        (b"\n\n", "holds no rows"),
        (b'{"question": "a", "result": 1}\n{"question": "b"\n', r"row 2: not JSON: .* \(character 18\); one object"),
        (b'{"question": "\xe9", "result": 1}\n', "row 1: not UTF-8 at byte 14 .* convert the file to UTF-8"),
        ('{"question": "a", "result": 1}\n'.encode("utf-16"), "row 1: not UTF-8"),
        (b"[1, 2]\n", "row 1: list where an object is wanted"),
        (b"[" * 100_000 + b"\n", "row 1: JSON nested too deep"),
        (b'{"question": "a", "result": ' + b"1" * 5000 + b"}\n", "row 1: .*digit"),
        (b'{"question": "a", "answer": 1}\n', "row 1: no column 'result'; it has: question, answer"),
        (b'{"question": 5, "result": 1}\n', "row 1: column 'question' is int; wanted: text"),
        (b'{"question": ["a"], "result": 1}\n', "row 1: column 'question' is list; .* needs template: chat"),
        (b'{"question": " ", "result": 1}\n', "row 1: column 'question' is empty"),
        (b'{"question": "a", "result": null}\n', "row 1: column 'result' is NoneType; wanted: str, int, float"),
        (b'{"question": "a", "result": true}\n', "row 1: column 'result' is bool"),
        (b'{"question": "a", "result": [1]}\n', "row 1: column 'result' is list"),
        (b'{"question": "a", "result": "many"}\n', "row 1: column 'result', 'many', holds no number .verifier numeric"),
        (b'{"question": "\\ud800", "result": 1}\n', "row 1: column 'question' holds half a surrogate pair"),
    ],
)
def test_a_bad_file_is_refused_with_its_row_and_what_is_wrong(tmp_path, content, message):
    (tmp_path / "rows.jsonl").write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        task(tmp_path, rows=None)


@pytest.mark.parametrize(
    ("question", "message"),
    [
        ([], "is list; wanted: text, or a list of messages"),
        (3, "is int; wanted: text, or a list of messages"),
        ([{"role": "user"}], "a message is {role: text, content: text}, not {'role': 'user'}"),
        (["hello"], "a message is {role: text, content: text}, not hello"),
        ([{"role": "user", "content": ["image"]}], "a message is {role: text, content: text}"),
        ([{"role": "robot", "content": "a"}], "role 'robot' is none of system, user, assistant"),
        (TALK[:2], "the last message is assistant's; it must be the user's"),
        ([{"role": "system", "content": "a"}, *TALK], "begins with a system message, and `system` is set too"),
    ],
)
def test_a_bad_conversation_is_refused(tmp_path, question, message):
    with pytest.raises(ConfigError, match=f"row 1: column 'question'.*{message}"):
        task(tmp_path, [{"question": question, "result": 1}], template="chat", system="You add.")


def test_all_bad_rows_are_named_up_to_ten(tmp_path):
    with pytest.raises(ConfigError) as caught:
        task(tmp_path, [{"question": "", "result": 1}] * 25)
    assert len(caught.value.problems) == 11
    assert ", row 10: " in caught.value.problems[9]
    assert caught.value.problems[10].endswith("15 more bad rows")


def test_a_column_that_no_row_has_is_told_once_by_its_key_with_the_near_one(tmp_path):
    rows = [{"question": "a", "results": 1}, *[{"question": "a", "note": "b"}] * 29]
    with pytest.raises(ConfigError) as caught:
        task(tmp_path, rows, columns=["level"])
    file = tmp_path / "rows.jsonl"
    assert caught.value.problems == [
        f"tasks.sums.answer: no column 'result' in any of 30 rows of {file} (did you mean 'results'? columns: "
        "question, results, note)",
        f"tasks.sums.columns: no column 'level' in any of 30 rows of {file} (columns: question, results, note)",
    ]


@pytest.mark.parametrize(
    ("file", "message"),
    [("none.jsonl", "tasks.sums.path: no file .*none.jsonl"), ("rows.csv", "is none of .jsonl, .parquet, .arrow")],
)
def test_a_missing_file_or_another_format_is_refused(tmp_path, file, message):
    with pytest.raises(ConfigError, match=message) as caught:
        task(tmp_path, rows=None, file=file)
    assert caught.value.hint


def test_a_folder_without_rows_is_refused(tmp_path):
    (tmp_path / "rows.jsonl").mkdir()
    with pytest.raises(ConfigError, match="has no .jsonl, .parquet, .arrow in it, but nothing"):
        task(tmp_path, rows=None)


def test_a_parquet_file_that_is_none_is_refused(tmp_path):
    (tmp_path / "rows.parquet").write_text("hello")
    with pytest.raises(ConfigError, match=r"rows.parquet is not a parquet file that can be read"):
        task(tmp_path, rows=None, file="rows.parquet")


def test_a_column_missing_from_parquet_is_refused(tmp_path):
    pq.write_table(pa.Table.from_pylist([{"question": "a", "results": 1}]), tmp_path / "rows.parquet")
    with pytest.raises(ConfigError, match="row 1: no column 'result'; it has: question"):
        task(tmp_path, rows=None, file="rows.parquet")


@pytest.mark.parametrize(
    ("settings", "efforts", "message"),
    [
        ({"system": "You add."}, None, "tasks.sums.system: a system prompt needs template: chat"),
        ({}, SYSTEM, "tasks.sums.template: raw has no system prompt to ask for an effort by"),
        ({"columns": ["effort"]}, None, "tasks.sums.columns: 'effort' is set for every row already"),
        ({"verifier": "numbers"}, None, "tasks.sums.verifier: 'numbers' is not a verifier"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(tmp_path, settings, efforts, message):
    with pytest.raises(ConfigError, match=message):
        task(tmp_path, efforts=efforts, **settings)


def test_a_verifier_of_ones_own_that_exits_ends_no_process(tmp_path):
    rows = task(tmp_path, verifier="sys:exit", held_out=0)
    rows._verifier = lambda completion, answer: sys.exit(0)
    (prompt,) = rows.prompts("train", 0, 0, 1)
    with pytest.raises(StageFailed, match="verifier sys:exit failed on row"):
        rows.verify(prompt, "3")


def test_a_failing_verifier_of_ones_own_names_itself_and_the_row(tmp_path):
    rows = task(tmp_path, verifier="math:gcd", held_out=0)
    (prompt,) = rows.prompts("train", 0, 0, 1)
    with pytest.raises(StageFailed) as caught:
        rows.verify(prompt, "3")
    assert f"task sums: verifier math:gcd failed on row {prompt.answer.number}" in str(caught.value)
    assert "TypeError" in str(caught.value)


# -------------------------------------------------------------------------------------------------------- digest


def test_the_digest_names_every_file_that_the_task_depends_on(tmp_path):
    write(tmp_path / "train.jsonl", ROWS)
    write(tmp_path / "held.jsonl", ROWS[:3])
    (tmp_path / "my").mkdir()
    (tmp_path / "my/graders.py").write_text("def same(a, b): return a == b")
    settings = FileTask(
        path="train.jsonl", eval_path="held.jsonl", prompt="question", answer="result", verifier="my.graders:same"
    )
    assert data_digest(settings, tmp_path) == {
        path: hashlib.sha256((tmp_path / path).read_bytes()).hexdigest()
        for path in ("train.jsonl", "held.jsonl", "my/graders.py")
    }


def test_the_digest_of_a_missing_file_is_refused(tmp_path):
    settings = FileTask(path="none.jsonl", prompt="q", answer="a", verifier="json:dumps")
    with pytest.raises(ConfigError, match=r"no file .*none.jsonl"):
        data_digest(settings, tmp_path)


def test_a_generated_task_depends_on_no_file(tmp_path):
    assert data_digest(ChainTask(task="chain", domain="math"), tmp_path) == {}


def test_load_task_makes_rows_of_a_file(tmp_path):
    path = write(tmp_path / "rows.jsonl", ROWS)
    settings = FileTask(path=str(path), prompt="question", answer="result", verifier="numeric")
    assert isinstance(load_task("sums", settings, None), FileRows)


def test_every_window_of_an_epoch_has_its_share_of_each_column(tmp_path):
    kinds = ["common"] * 700 + ["rare"] * 60 + ["other"] * 240
    rows = [{"question": f"q{n}", "result": n, "kind": kind} for n, kind in enumerate(kinds)]
    split = task(tmp_path, rows, columns=["kind"], held_out=0.0)
    seen = [prompt.columns["kind"] for prompt in split.prompts("train", 5, 0, 2000)]
    for kind in set(kinds):
        share = kinds.count(kind) / len(kinds)
        for start in range(1950):
            found = seen[start : start + 50].count(kind)
            assert abs(found - 50 * share) <= 2 + (start < 1000 < start + 50), (kind, start, found)  # two epochs meet
    assert sorted(texts(split.prompts("train", 5, 0, 1000))) == sorted(f"q{n}" for n in range(1000))
