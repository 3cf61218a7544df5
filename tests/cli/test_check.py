"""`check`, and refusals of the gate before anything starts: what is told, what is accepted, what is remembered."""

import json

import pytest
from engine.stages import EFFORTS, MODEL, TASKS
from gate.models import edit, save

from opdctl.cli.options import complete_checks
from opdctl.store import Workspace

HUB = f"hf:org/teacher@{'0' * 40}"
SHAPE, WORDS = MODEL["shape"], MODEL["tokenizer"]["words"]


@pytest.fixture
def pipeline(workspace):
    """Writes a pipeline: a student learns from a teacher, both read from folders."""
    save(workspace / "student", WORDS, **SHAPE)
    save(workspace / "teacher", WORDS, noise=0.1, **SHAPE)
    train = {"max_steps": 1, "global_batch_size": 2, "optimizer": {"lr": 1e-3}}

    def write(name="p", gate=None, **stages):
        opd = {
            "kind": "opd",
            "backend": "embedded",
            "inputs": {"student": "path:student", "teachers": [{"ref": "path:teacher", "route": {"domain": "math"}}]},
            "config": {
                "data": {"tasks": ["math"], "efforts": ["max"]},
                "rollout": {"prompts": 2, "max_prompt_tokens": 10, "max_completion_tokens": 6},
                "train": train,
                "loss": {"form": "full_vocab"},
                "route_by": ["domain"],
            },
        }
        tree = {
            "name": name,
            "model": MODEL,
            "tasks": {"math": TASKS["math"]},
            "efforts": EFFORTS,
            "machine": {"slots": 2, "cpus": 2},
            "tracking": {"enabled": False},
            "gate": gate or {},
            "stages": {"opd": opd, **stages},
        }
        (workspace / f"{name}.yaml").write_text(json.dumps(tree))
        return f"{name}.yaml"

    return write


def end_elsewhere(workspace):
    """The teacher ends at a word of its own."""
    last = len(WORDS) - 1
    for file, content in (
        ("config.json", {"eos_token_id": last}),
        ("generation_config.json", {"eos_token_id": last}),
        ("tokenizer_config.json", {"eos_token": WORDS[last]}),
    ):
        edit(workspace / "teacher" / file, lambda known, new=content: known.update(new))


def test_what_is_in_order_is_counted_and_fits_the_terminal(call, pipeline, workspace):
    code, out, _ = call("check", pipeline(), "--files-only")
    assert code == 0, out
    assert out.startswith("p, run p: 1 stage, 11 verdicts: 11 go\n")
    assert "✓ in order: vocabulary 1, width 1" in out
    assert max(map(len, out.split("\n"))) <= 80
    assert not (workspace / "runs").exists()


def test_a_folder_that_is_called_as_a_repository_is_not_taken_for_it(call, pipeline, workspace):
    """`--files-only` fetches nothing, and compares nothing in its place."""
    (workspace / "org").mkdir()
    (workspace / "teacher").rename(workspace / "org" / "teacher")
    name = pipeline()
    edit(workspace / name, lambda tree: tree["stages"]["opd"]["inputs"]["teachers"][0].update(ref=HUB))
    code, out, _ = call("check", name, "--files-only", "--json")
    assert code == 0, out
    judged = json.loads(out)["stages"]["opd"]
    assert judged
    assert not [one for one in judged if HUB in one["subject"]]


def test_every_verdict_is_shown_on_request(call, pipeline):
    out = call("check", pipeline(), "--files-only", "--all")[1]
    assert f"✓ vocabulary  path:student -> path:teacher: go  (opd)\n  the same {len(WORDS)} words" in out


def test_a_refusal_ends_with_1_and_names_check_pair_evidence_and_remedy(call, pipeline, workspace):
    name = pipeline()
    end_elsewhere(workspace)
    code, out, _ = call("check", name, "--files-only")
    assert code == 1
    assert "✗ eos  path:student -> path:teacher: refuse  (opd)" in out
    assert "student ends at 2 (<eos>), teacher at" in out
    assert "generation_config.json of both" in " ".join(out.split())


def test_as_json_with_the_exit_code(call, pipeline, workspace):
    name = pipeline()
    end_elsewhere(workspace)
    code, out, _ = call("check", name, "--files-only", "--json")
    document = json.loads(out)
    assert (code, document["ok"], document["pipeline"]) == (1, False, "p")
    [found] = [one for one in document["stages"]["opd"] if one["stops"]]
    assert (found["check"], found["outcome"], found["accepted"]) == ("eos", "refuse", False)


def test_an_accepted_refusal_stops_nothing_and_is_said(call, pipeline, workspace):
    name = pipeline()
    end_elsewhere(workspace)
    code, out, _ = call("check", name, "--files-only", "--accept", "eos")
    assert code == 0
    assert "(1 accepted)" in out
    assert "refuse, accepted" in out


def test_a_check_of_another_name_is_refused_with_the_near_one(call, pipeline):
    for command in ("check", "plan", "run"):
        code, _, err = call(command, pipeline(), "--accept", "vocabulry")
        assert code == 2
        assert "--accept vocabulry: no check is called so (did you mean 'vocabulary'?" in err


def test_the_shell_completes_names_of_checks():
    assert list(complete_checks("o")) == ["overlap", "origin"]


def test_models_are_asked_where_they_are_there_and_the_others_are_counted(call, pipeline):
    train = {"max_steps": 1, "global_batch_size": 2, "optimizer": {"lr": 1e-3}}
    config = {"data": {"tasks": ["math"], "efforts": ["max"]}, "max_tokens": 24, "train": train}
    first = {"kind": "sft", "backend": "embedded", "inputs": {"init": "model:"}, "config": config}
    later = first | {"inputs": {"init": "stage:first"}}
    code, out, err = call("check", pipeline(first=first, later=later), "--json", "--only", "first", "--only", "later")
    assert code == 0, err
    stages = json.loads(out)["stages"]
    assert stages["first"]  # files say nothing about it
    assert stages["later"] == []
    out = call("check", pipeline(first=first, later=later), "--only", "later", "--only", "first")[1]
    assert "models not asked: 1 stage with inputs still to be made" in " ".join(out.split())


def test_a_bad_teacher_of_a_later_stage_is_refused_before_the_first_starts(call, pipeline, workspace):
    """The student is still to be made: the new model that it begins with stands for it."""
    train = {"max_steps": 1, "global_batch_size": 2, "optimizer": {"lr": 1e-3}}
    config = {"data": {"tasks": ["math"], "efforts": ["max"]}, "max_tokens": 24, "train": train}
    name = pipeline(sft={"kind": "sft", "backend": "embedded", "inputs": {"init": "model:"}, "config": config})

    def swap(tokenizer):
        words = tokenizer["model"]["vocab"]
        words[WORDS[10]], words[WORDS[11]] = words[WORDS[11]], words[WORDS[10]]

    edit(workspace / "teacher" / "tokenizer.json", swap)
    code, _, err = call("run", name, "stages.opd.inputs.student=stage:sft")
    assert code == 1
    assert f"opd: the gate: vocabulary, sft -> path:teacher: refuse: id 10 is {WORDS[10]!r} to student" in err
    assert "--accept vocabulary" in err
    assert not list(workspace.glob("runs/*/stages/*"))


def test_what_was_accepted_is_in_the_record_the_status_and_the_lineage(call, pipeline, workspace):
    name = pipeline(gate={"models": False})
    end_elsewhere(workspace)
    assert call("run", name)[0] == 1
    code, out, err = call("run", name, "--accept", "eos")
    assert code == 0, out + err
    record = Workspace(workspace).run("p").stage("opd").record()
    assert record.accepted == ["eos"]
    assert "accepted: eos" in call("status")[1]
    assert "accepted: eos" in call("lineage")[1]
    assert json.loads(call("lineage", "--json")[1])["checkpoints"][record.id]["accepted"] == ["eos"]


def test_a_gate_that_is_off_says_so(call, pipeline, workspace):
    name = pipeline(gate={"enabled": False})
    end_elsewhere(workspace)
    code, out, _ = call("check", name, "--files-only")
    assert code == 0
    assert "gate.enabled is false: opd" in out


def test_an_exam_whose_prompts_a_stage_before_it_trains_on_is_refused(call, pipeline, workspace):
    rows = [{"q": f"{number} plus one", "a": str(number + 1)} for number in range(12)]
    for name, some in (("mine", rows[:6]), ("few", rows[:1]), ("asked", rows[5:])):
        (workspace / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
    file = {"task": "file", "prompt": "q", "answer": "a", "verifier": "exact", "held_out": 0.0}
    tasks = {"mine": file | {"path": "mine.jsonl"}, "exam": file | {"path": "few.jsonl", "eval_path": "asked.jsonl"}}
    train = {"max_steps": 1, "global_batch_size": 2, "optimizer": {"lr": 1e-3}}
    sft = {"kind": "sft", "backend": "embedded", "inputs": {"init": "model:"}}
    sft["config"] = {"data": {"tasks": ["mine"]}, "max_tokens": 24, "train": train}
    rollout = {"prompts": 2, "max_prompt_tokens": 10, "max_completion_tokens": 6}
    exam = {"kind": "eval", "backend": "embedded", "inputs": {"models": ["stage:sft"]}}
    exam["config"] = {"data": {"tasks": ["exam"]}, "rollout": rollout}
    tree = json.loads((workspace / pipeline()).read_text()) | {"tasks": tasks, "stages": {"sft": sft, "exam": exam}}
    (workspace / "p.yaml").write_text(json.dumps(tree))
    code, out, err = call("check", "p.yaml", "--files-only")
    assert code == 1, out + err
    assert "✗ overlap  task exam: refuse  (exam)" in out
    assert "1 of 7 held-out prompts are trained on as rows of mine, 1 word for word" in " ".join(out.split())


def test_a_prompt_that_is_too_long_is_found_in_the_files_and_named_with_its_stage(call, pipeline, workspace):
    name = pipeline()
    edit(workspace / name, lambda tree: tree["stages"]["opd"]["config"]["rollout"].update(max_prompt_tokens=2))
    code, out, _ = call("check", name, "--files-only")
    assert code == 1
    assert "✗ context  task math: refuse  (opd)" in out
    code, _, err = call("run", name)
    assert code == 1
    assert "config.rollout.max_prompt_tokens is 2" in " ".join(err.split())
    assert not (workspace / "runs" / "p" / "stages" / "opd" / "attempts").exists()


def test_what_only_a_model_is_refused_for_is_told_with_its_stage(call, pipeline, workspace):
    name = pipeline()
    edit(workspace / name, lambda tree: tree["stages"]["opd"]["config"]["rollout"].update(max_prompt_tokens=2))
    code, _, err = call("check", name)
    assert code == 1
    assert "error: stages.opd: a prompt has" in err
