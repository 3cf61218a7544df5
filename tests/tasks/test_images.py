"""Rows with images: paths beside the text, one for each mark in it."""

import json

import pytest

from opdctl.errors import ConfigError
from opdctl.settings import FileTask
from opdctl.tasks.files import FileRows

ROW = {"question": "<image> How many cats? <image>", "result": 3, "pictures": ["a.png", "b.png"]}
SETTINGS = {"path": "rows.jsonl", "prompt": "question", "answer": "result", "verifier": "numeric", "held_out": 0.0}


def task(folder, *rows, pictures=("a.png", "b.png"), **settings):
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for picture in pictures:
        (folder / picture).write_bytes(b"")
    given = SETTINGS | {"images": "pictures", "template": "chat"} | settings
    return FileRows("cats", FileTask(**given), None, folder)


def test_a_prompt_has_the_absolute_paths_of_its_images_in_order(tmp_path):
    (prompt,) = task(tmp_path, ROW).prompts("train", 0, 0, 1)
    assert prompt.images == [str(tmp_path / "a.png"), str(tmp_path / "b.png")]
    assert prompt.messages[-1]["content"] == ROW["question"]


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"pictures": ["a.png"]}, "has 1 images, and the prompt has 2 <image>"),
        ({"pictures": "a.png"}, "wanted: a list of paths"),
        ({"pictures": [{"bytes": "x"}, "b.png"]}, "wanted: a list of paths"),
        ({"pictures": None}, "has 0 images"),
    ],
)
def test_images_that_do_not_belong_to_the_marks_are_a_bad_row(tmp_path, changed, told):
    with pytest.raises(ConfigError, match=told):
        task(tmp_path, ROW | changed)


def test_an_image_that_is_not_there_is_refused_by_its_row_and_path(tmp_path):
    with pytest.raises(ConfigError, match=r"tasks.cats: row 1: no image .*b\.png"):
        task(tmp_path, ROW, pictures=["a.png"]).prompts("train", 0, 0, 1)


def test_images_need_a_chat_template(tmp_path):
    with pytest.raises(ConfigError, match="tasks.cats.images: a model reads images by its chat template"):
        task(tmp_path, ROW, template="raw")


def test_the_same_words_about_other_images_are_another_prompt(tmp_path):
    rows = [ROW, ROW | {"pictures": ["b.png", "a.png"]}]
    contents = {prompt.answer.content for prompt in task(tmp_path, *rows).prompts("train", 0, 0, 2)}
    assert len(contents) == 2
