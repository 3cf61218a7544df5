"""Nothing starts that cannot finish: files, graders, held-out sizes and routes are looked at before any worker."""

import json

import pytest
import toy

from opdctl.errors import ConfigError

COUNT = 40


@pytest.fixture
def rows(workspace):
    """Forty sums in a file of the workspace."""
    lines = [json.dumps({"q": f"{n} + 1", "a": n + 1, "kind": "odd" if n % 2 else "even"}) for n in range(COUNT)]
    (workspace / "sums.jsonl").write_text("\n".join(lines))
    return workspace


def task(**more):
    return {"task": "file", "path": "sums.jsonl", "prompt": "q", "answer": "a", "verifier": "numeric"} | more


def recipe(folder, tasks, *, stages=None):
    stages = stages or {"first": toy.sft(), "sft": toy.sft("stage:first", task="sums")}
    return toy.pipeline(stages, folder=folder, tasks={"plain": {"task": "chain", "domain": "math"}} | tasks)


def problems(wanted):
    """Of a run that is refused before anything is launched."""
    with pytest.raises(ConfigError) as refused:
        toy.run(wanted)
    assert not list(wanted.folder.glob("runs/*/stages/*/attempts"))
    return refused.value.problems


def test_good_files_are_let_through(rows):
    assert toy.run(recipe(rows, {"sums": task()})).done == ["first", "sft"]


def test_a_bad_row_is_told_before_the_first_stage_starts(rows):
    with (rows / "sums.jsonl").open("a") as file:
        file.write('\n{"q": "1 + 1"}\n{"q": "", "a": 3, "kind": "odd"}')
    first, second = problems(recipe(rows, {"sums": task()}))
    assert "tasks.sums.path" in first
    assert "row 41: no column 'a'" in first
    assert "row 42" in second


def test_a_grader_that_rejects_right_answers_is_refused(rows):
    """Demonstrations without the tag that the grader asks for."""
    (rows / "tags.py").write_text("def inside(completion, answer): return completion == f'<answer>{answer}</answer>'")
    lines = [json.dumps({"q": f"{n} + 1", "a": n + 1, "shown": f"It is {n + 1}."}) for n in range(COUNT)]
    (rows / "sums.jsonl").write_text("\n".join(lines))
    [problem] = problems(recipe(rows, {"sums": task(verifier="tags:inside", completion="shown")}))
    assert problem.startswith("tasks.sums.verifier: tags:inside rejects 8 reference answers: ")


def test_prompts_of_both_files_are_refused(rows):
    (rows / "held.jsonl").write_text('{"q": "7  + 1", "a": 8, "kind": "odd"}\n')
    [problem] = problems(recipe(rows, {"sums": task(eval_path="held.jsonl")}))
    assert "rows of path and eval_path: 8 and 1" in problem


def test_more_evaluation_prompts_than_rows_are_refused_with_both_numbers(rows):
    evaluation = toy.evaluation("stage:first", task="sums")
    evaluation["config"]["rollout"]["prompts"] = 50
    [problem] = problems(recipe(rows, {"sums": task()}, stages={"first": toy.sft(), "eval": evaluation}))
    assert problem.startswith("stages.eval.config.rollout.prompts: 50, but task 'sums' has ")


def test_more_prompts_to_sample_than_rows_are_refused_with_both_numbers(rows):
    sample = toy.evaluation(task="sums") | {"kind": "sample", "inputs": {"model": "stage:first"}}
    sample["config"]["rollout"]["prompts"] = 50
    [problem] = problems(recipe(rows, {"sums": task(held_out=0.0)}, stages={"first": toy.sft(), "drawn": sample}))
    assert problem == "stages.drawn.config.rollout.prompts: 50, but task 'sums' has 40 rows for training"


def test_rows_without_a_teacher_are_refused_by_their_columns(rows):
    train = {"max_steps": 4, "global_batch_size": 4, "save_every": 2, "optimizer": {"lr": 0.1}}
    rollout = {"prompts": 4, "max_prompt_tokens": 8, "max_completion_tokens": 8}
    student = {
        "kind": "opd",
        "backend": "embedded",
        "inputs": {"student": "stage:first", "teachers": [{"ref": "stage:a", "route": {"kind": "even"}}]},
        "config": {
            "data": {"tasks": ["sums"]},
            "rollout": rollout,
            "train": train,
            "loss": {"form": "full_vocab"},
            "route_by": ["kind"],
        },
    }
    stages = {"first": toy.sft(), "a": toy.sft("stage:first"), "student": student}
    [problem] = problems(recipe(rows, {"sums": task(columns=["kind"])}, stages=stages))
    assert problem.startswith("stages.student.inputs.teachers: no teacher for kind=odd")


def test_programs_of_a_model_need_a_machine_that_contains_them(rows, monkeypatch):
    monkeypatch.setattr("opdctl.jail.pool.isolation", lambda: "no namespaces")
    told = problems(recipe(rows, {"tool": {"task": "python_tool"}}, stages={"sft": toy.sft(task="tool")}))
    assert told[0].startswith("code of a model may not run here: this machine cannot contain it (no namespaces)")


def test_rows_of_a_task_with_tools_are_read(rows):
    tool = {"task": "calculator", "path": "sums.jsonl"}
    told = problems(recipe(rows, {"tool": tool}, stages={"sft": toy.sft(task="tool")}))
    assert "row 1: wanted: the columns question and answer" in told[0]


def test_all_problems_of_all_tasks_are_told_at_once(rows):
    (rows / "other.jsonl").write_text("{}\n")
    stages = {"first": toy.sft(task="sums"), "second": toy.sft(task="other"), "third": toy.sft(task="third")}
    tasks = {
        "sums": task(verifier="numerc"),
        "other": task(path="other.jsonl"),
        "third": task(verifier="nowhere:f"),
    }
    told = problems(recipe(rows, tasks, stages=stages))
    assert [problem.split(":")[0] for problem in told] == [
        "tasks.sums.verifier",
        "tasks.other.path",
        "tasks.third.verifier",
    ]


def test_a_verifier_is_found_in_the_workspace_wherever_the_command_is_given(rows, tmp_path, monkeypatch):
    """In the worker too, whose current folder is the workspace."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    (rows / "own_grader.py").write_text("def same(completion, answer): return completion.strip() == answer")
    assert toy.run(recipe(rows, {"sums": task(verifier="own_grader:same")})).done == ["first", "sft"]
    log = toy.stage(recipe(rows, {"sums": task(verifier="own_grader:same")}), "sft").attempts()[0].log.read_text()
    assert f"works in {rows}" in log
