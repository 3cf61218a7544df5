"""Which files a path of data means, and that all formats hold the same rows."""

import json

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from opdctl.errors import ConfigError
from opdctl.settings import FileTask
from opdctl.tasks.files import FileRows, data_digest
from opdctl.tasks.shards import data_files, read_raw

ROWS = [{"q": f"What is {n}?", "a": n, "doc": {"kind": "sum"}} for n in range(20)]


def names(path):
    return [file.name for file in data_files(path)]


def rows(path):
    return [row for file in data_files(path) for _, row in read_raw(file, None, "path")]


def jsonl(path, part):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in part))


@pytest.fixture
def forms(tmp_path):
    """The same rows as files of every kind."""
    jsonl(tmp_path / "rows.jsonl", ROWS)
    jsonl(tmp_path / "parts/b.jsonl", ROWS[10:])
    jsonl(tmp_path / "parts/a.jsonl", ROWS[:10])
    (tmp_path / "shards").mkdir()
    for i in range(2):
        table = pa.Table.from_pylist(ROWS[10 * i : 10 * i + 10])
        pq.write_table(table, tmp_path / f"shards/train-0000{i}-of-00002.parquet")
    datasets.disable_progress_bars()
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved", num_shards=3)
    return tmp_path


@pytest.mark.parametrize("form", ["rows.jsonl", "parts", "shards", "saved", "shards/train-*.parquet", "parts/*.jsonl"])
def test_every_form_holds_the_same_rows_in_the_same_order(forms, form):
    assert rows(forms / form) == ROWS


@pytest.mark.parametrize("form", ["parts", "shards", "saved"])
def test_a_task_reads_folders_as_it_reads_a_file(forms, form):
    def prompts(path):
        settings = FileTask(path=str(forms / path), prompt="q", answer="a", verifier="numeric", columns=["doc.kind"])
        task = FileRows("mine", settings, None)
        return [(p.text, p.columns) for split in ("train", "eval") for p in task.prompts(split, 3, 0, task.size(split))]

    assert prompts(form) == prompts("rows.jsonl")


def test_the_arrow_file_format_is_read_too(tmp_path):
    table = pa.Table.from_pylist(ROWS)
    with pa.OSFile(str(tmp_path / "rows.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    assert rows(tmp_path / "rows.arrow") == ROWS


def test_a_bad_row_of_a_shard_is_named_by_file_and_number(forms):
    with (forms / "parts/b.jsonl").open("a") as stream:
        stream.write('{"q": 1, "a": 2}\n')
    with pytest.raises(ConfigError, match=r"parts/b.jsonl, row 11: column 'q' is int"):
        FileRows("mine", FileTask(path=str(forms / "parts"), prompt="q", answer="a", verifier="numeric"), None)


@pytest.mark.parametrize(
    "files", [["train.jsonl", "test.jsonl"], ["train-0-of-1.parquet", "test-0-of-1.parquet"], ["a.jsonl", "a.parquet"]]
)
def test_a_folder_with_several_splits_or_formats_is_refused(tmp_path, files):
    for name in files:
        (tmp_path / name).touch()
    with pytest.raises(ConfigError, match="which of them are the rows") as caught:
        data_files(tmp_path)
    assert "*" in caught.value.hint


def test_a_folder_of_several_datasets_names_its_splits(tmp_path):
    datasets.disable_progress_bars()
    one = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict({"train": one, "test": one}).save_to_disk(tmp_path / "all")
    with pytest.raises(ConfigError, match="holds several splits: test, train"):
        data_files(tmp_path / "all")
    assert rows(tmp_path / "all/test") == ROWS


def test_a_pattern_that_matches_nothing_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"tasks.mine.path: no file .*train-\*.parquet"):
        data_files(tmp_path / "train-*.parquet", "tasks.mine.path")


def test_the_digest_of_a_folder_changes_with_any_of_its_files(forms):
    settings = FileTask(path="parts", prompt="q", answer="a", verifier="exact")
    before = data_digest(settings, forms)
    jsonl(forms / "parts/b.jsonl", ROWS[9:])
    after = data_digest(settings, forms)
    assert before.keys() == after.keys() == {"parts"}
    assert before != after
    jsonl(forms / "parts/c.jsonl", ROWS[:1])
    assert data_digest(settings, forms) != after
