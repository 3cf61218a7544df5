import json
from pathlib import Path

import pytest
from pydantic import ValidationError
from tasks.environments.episodes import FORMAT, asked, call, played

from opdctl.errors import ConfigError
from opdctl.settings import SearchTask
from opdctl.tasks import load_task
from opdctl.tasks.environments.bm25 import Bm25
from opdctl.tasks.environments.search import Search, read_corpus, world


def search(**settings: object) -> Search:
    task = load_task("it", SearchTask.model_validate({"task": "search", "people": 60, **settings}), None)
    assert isinstance(task, Search)
    return task


def test_a_text_with_rarer_words_of_the_query_comes_first() -> None:
    index = Bm25(["the cat", "the dog and the cat", "a zebra", "the the the"])
    assert index.best("the zebra", 4)[0] == 2
    assert index.best("cat", 4) == [0, 1]
    assert index.best("nothing here", 4) == []
    assert index.best("cat", 1) == [0]


def test_texts_that_match_alike_come_in_their_order() -> None:
    assert Bm25(["x y", "y x", "x y"]).best("x", 3) == [0, 1, 2]


def test_every_question_has_an_answer_in_the_corpus() -> None:
    made = world(0, 60)
    for person in made.people:
        path = made.path(person)
        assert len(path) == 4
        for subject, found in zip(path, path[1:], strict=False):
            assert found in made.texts[subject]


def test_a_world_is_the_same_each_time_and_another_by_another_seed() -> None:
    assert world.__wrapped__(1, 60) == world.__wrapped__(1, 60)
    assert world(1, 60).texts != world(2, 60).texts


def test_an_answer_is_compared_without_case_punctuation_and_articles() -> None:
    task = search()
    prompt = asked(task)
    answer = prompt.answer["answer"]
    assert played(task, prompt, f"Answer: The {answer.upper()}.").correct
    assert not played(task, prompt, f"Answer: {answer} or {answer}").correct


def test_an_id_that_is_not_there_is_told() -> None:
    task = search()
    step = task.environment(asked(task), FORMAT).step(call("open", id="../etc/passwd"))
    assert step.observation.startswith("Error: no text '../etc/passwd'")


def test_a_folder_of_texts_is_searched_and_its_questions_are_asked(tmp_path: Path) -> None:
    (tmp_path / "texts" / "more").mkdir(parents=True)
    (tmp_path / "texts" / "a.md").write_text("The mill stands at the brook.")
    (tmp_path / "texts" / "more" / "b.txt").write_text("x" * 5000)
    (tmp_path / "q.jsonl").write_text(json.dumps({"question": "Where is the mill?", "answer": "at the brook"}) + "\n")
    task = search(corpus=str(tmp_path / "texts"), questions=str(tmp_path / "q.jsonl"), held_out=0.0)
    prompt = asked(task)
    episode = task.environment(prompt, FORMAT)
    assert episode.step(call("search", query="mill")).observation == "a.md: The mill stands at the brook."
    assert episode.step(call("open", id="more/b.txt")).observation == "x" * 4000 + " ... (cut)"
    assert played(task, prompt, "Answer: At the brook").correct
    with pytest.raises(ConfigError, match="cannot be used by sft"):
        task.demonstrations(0, 0, 1)


def test_rows_of_texts_have_an_id_each(tmp_path: Path) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_text('{"id": "1", "text": "a"}\n{"id": "1", "text": "b"}\n')
    with pytest.raises(ConfigError, match="row 2: id '1' comes twice"):
        read_corpus(path, "corpus")


def test_a_corpus_without_questions_is_refused() -> None:
    with pytest.raises(ValidationError, match="belong together"):
        SearchTask(task="search", corpus="texts")
