"""Rows without a teacher, teachers that come one at a time, and prompts of an evaluation that were trained on."""

import json

import pytest
from gate.models import CHAIN, distillation, judged, opd_config, stage, verdict

from opdctl.verdicts import Outcome

ROWS = [{"question": f"what is {number} plus one", "answer": str(number + 1)} for number in range(40)]
FILE = {"task": "file", "prompt": "question", "answer": "answer", "verifier": "exact", "held_out": 0.0}


def write(file, rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def teachers(folder, routes, config, tasks):
    inputs = [("student", None), *(("teachers", None, route) for route in routes)]
    return stage(folder, "opd", inputs, config=config, tasks=tasks)


# --------------------------------------------------------------------------------------------------------- routing


def test_every_row_has_a_teacher(tmp_path):
    found = verdict(distillation(tmp_path, None, None, None), "routing")
    assert (found.outcome, found.evidence) == (Outcome.GO, "2 teachers, by domain: every row has one")


def test_a_column_of_a_file_without_a_teacher_is_refused_with_its_value(tmp_path):
    rows = [row | {"level": "hard" if number % 3 else "easy"} for number, row in enumerate(ROWS)]
    tasks = {"mine": FILE | {"path": write(tmp_path / "rows.jsonl", rows), "columns": ["level"]}}
    config = opd_config(["mine"], route_by=["domain", "level"])
    found = verdict(teachers(tmp_path, [{"domain": "mine", "level": "easy"}], config, tasks), "routing")
    assert (found.outcome, found.evidence) == (Outcome.REFUSE, "no teacher for domain=mine, level=hard")
    both = [{"domain": "mine", "level": level} for level in ("easy", "hard")]
    assert verdict(teachers(tmp_path, both, config, tasks), "routing").outcome is Outcome.GO


def test_a_declared_default_takes_what_has_no_route(tmp_path):
    config = opd_config(["t0", "t1"], default_teacher="new")
    found = verdict(
        distillation(tmp_path, None, None, config=config, tasks=dict.fromkeys(["t0", "t1"], CHAIN)), "routing"
    )
    assert found.outcome is Outcome.GO
    assert "the default" in found.evidence


# ---------------------------------------------------------------------------------------------------- interleaving


def named(spec):
    """Teachers by their domain: labels are their folders' names, and here all are new."""
    from dataclasses import replace

    given = [replace(one, label=one.route.get("domain", one.label)) for one in spec.inputs]
    return replace(spec, inputs=given)


def test_one_prompt_a_step_means_one_teacher_a_step(tmp_path):
    config = opd_config(["t0", "t1"], prompts=1)
    found = verdict(named(distillation(tmp_path, None, None, None, config=config)), "interleaving")
    assert found.outcome is Outcome.WARN
    assert found.evidence.startswith("100% of the optimizer steps have rows of one teacher only (1 prompts a step")
    assert "config.rollout.prompts" in found.remedy


def test_tasks_dealt_in_turn_are_interleaved(tmp_path):
    found = verdict(named(distillation(tmp_path, None, None, None)), "interleaving")
    assert (found.outcome, found.values["alone"]) == (Outcome.GO, 0.0)


def test_a_batch_split_into_steps_of_one_prompt_is_found(tmp_path):
    config = opd_config(["t0", "t1"])
    config["train"]["global_batch_size"] = 1
    found = verdict(named(distillation(tmp_path, None, None, None, config=config)), "interleaving")
    assert (found.outcome, found.values["rows"]) == (Outcome.WARN, 1)


def test_a_file_sorted_by_teacher_is_interleaved_by_the_shuffle(tmp_path):
    rows = [row | {"level": "easy" if number < 20 else "hard"} for number, row in enumerate(ROWS)]
    tasks = {"mine": FILE | {"path": write(tmp_path / "rows.jsonl", rows), "columns": ["level"]}}
    config = opd_config(["mine"], route_by=["level"], prompts=8)
    spec = teachers(tmp_path, [{"level": "easy"}, {"level": "hard"}], config, tasks)
    from dataclasses import replace

    spec = replace(spec, inputs=[replace(one, label=one.route.get("level", "student")) for one in spec.inputs])
    found = verdict(spec, "interleaving")
    assert found.outcome is Outcome.GO
    assert found.values["alone"] < 0.2


def test_a_main_teacher_with_a_rare_one_beside_it_is_no_fault(tmp_path):
    config = opd_config(["t0", "t1"], prompts=2, steps=64)
    config["data"]["ratios"] = {"t0": 19}
    found = verdict(named(distillation(tmp_path, None, None, None, config=config)), "interleaving")
    assert found.outcome is Outcome.GO
    assert found.values["alone"] > 0.5


def test_one_teacher_has_no_turns(tmp_path):
    assert not [one for one in judged(distillation(tmp_path, None, None)) if one.check == "interleaving"]


# --------------------------------------------------------------------------------------------------------- overlap


@pytest.fixture
def exam(tmp_path):
    """An evaluation on rows of its own, after training on others."""

    def make(trained, asked):
        tasks = {
            "mine": FILE | {"path": write(tmp_path / "train.jsonl", trained)},
            "exam": FILE | {"path": write(tmp_path / "few.jsonl", ROWS[:1]), "eval_path": write(tmp_path / "e", asked)},
        }
        (tmp_path / "e").rename(tmp_path / "exam.jsonl")
        tasks["exam"]["eval_path"] = str(tmp_path / "exam.jsonl")
        rollout = {"prompts": 4, "max_prompt_tokens": 8, "max_completion_tokens": 8}
        return stage(
            tmp_path,
            "eval",
            [("models", None)],
            config={"data": {"tasks": ["exam"]}, "rollout": rollout},
            tasks={"exam": tasks["exam"]},
            gate={"trained": {"mine": tasks["mine"]}},
        )

    return make


def test_a_prompt_that_another_task_trains_on_is_refused_with_its_text(exam):
    found = verdict(exam(ROWS[:30], [*ROWS[30:], ROWS[7] | {"question": "what  is 7 plus one"}]), "overlap")
    assert found.outcome is Outcome.REFUSE
    assert found.evidence == (
        "1 of 11 held-out prompts are trained on as rows of mine, 1 word for word: 'what is 7 plus one'"
    )
    assert found.values == {"prompts": 11, "exact": 1, "nearly": 1}


def test_a_prompt_that_differs_in_case_alone_is_warned_about(exam):
    found = verdict(exam(ROWS[:30], [*ROWS[30:], {"question": "What is 7 plus one?", "answer": "8"}]), "overlap")
    assert (found.outcome, found.values["exact"], found.values["nearly"]) == (Outcome.WARN, 0, 1)


def test_rows_apart_pass(exam):
    found = verdict(exam(ROWS[:30], ROWS[30:]), "overlap")
    assert (found.outcome, found.evidence) == (Outcome.GO, "none of 10 held-out prompts is trained on")


def test_generated_tasks_hold_out_by_content_and_need_no_look(tmp_path):
    spec = stage(tmp_path, "eval", [("models", None)], config={"data": {"tasks": ["t"]}}, tasks={"t": CHAIN})
    assert not [one for one in judged(spec) if one.check == "overlap"]


def test_data_that_cannot_be_read_are_left_to_those_who_read_them(tmp_path):
    tasks = {"mine": FILE | {"path": str(tmp_path / "nowhere.jsonl"), "columns": ["level"]}}
    spec = teachers(tmp_path, [{"level": "easy"}], opd_config(["mine"], route_by=["level"]), tasks)
    assert {one.check for one in judged(spec)}.isdisjoint({"routing", "interleaving"})
