"""What stays, by the rules and whatever they say; compared with a slow definition over generated workspaces."""

import pytest
from checkpoints import begin, output
from kept import declare, generate, must_stay, publish

from opdctl.garbage import collect, survey
from opdctl.ledger import Pin
from opdctl.records import RECORD
from opdctl.store import Workspace
from opdctl.verify import Verifier


@pytest.fixture
def quick(monkeypatch):
    """Many small files: without waiting for the disk."""
    monkeypatch.setattr("os.fsync", lambda descriptor: None)


@pytest.fixture
def found(workspace, quick):
    made = Workspace(workspace)
    for run in ("a", "b"):
        declare(made, run, {"sft": {"keep_last": 0}, "mopd": {"keep_last": 0}, "max[domain=math]": {"keep_last": 0}})
    return made


def going(workspace, runs=()):
    return {item.record.id for item in survey(workspace, runs).go if item.record}


def reasons(workspace, record):
    (told,) = (item.why for item in survey(workspace).stay if item.record.id == record.id)
    return told


# ------------------------------------------------------------------------------------------------------- any workspace


@pytest.mark.parametrize("part", range(4))
def test_gc_deletes_what_the_definition_does_not_keep_and_verify_misses_nothing(tmp_path, quick, part):
    deleted = 0
    for seed in range(part * 10, part * 10 + 10):
        folder = tmp_path / str(seed)
        workspace = generate(folder, seed)
        before = {path.parent.name for path in folder.glob("runs/**/checkpoints/*/record.json")}
        stay = must_stay(folder)
        said = survey(workspace)
        assert {item.record.id for item in said.stay} == stay, seed
        assert {item.record.id for item in said.go if item.what == "checkpoint"} == before - stay, seed

        done = collect(workspace)

        assert [item.path for item in done.go] == [item.path for item in said.go]
        assert {path.parent.name for path in folder.glob("runs/**/checkpoints/*/record.json")} == stay, seed
        assert Verifier(Workspace(folder)).verify().problems == [], seed
        assert survey(workspace).go == (), f"{seed}: a second time finds something more"
        deleted += len(before - stay)
    assert deleted > 10


def test_gc_of_one_run_touches_no_other(tmp_path, quick):
    for seed in range(100, 108):
        folder = tmp_path / str(seed)
        workspace = generate(folder, seed)
        stay = must_stay(folder, untouched=("a", "c"))
        collect(workspace, ["b"])
        assert {path.parent.name for path in folder.glob("runs/**/checkpoints/*/record.json")} == stay, seed
        assert Verifier(Workspace(folder)).verify().problems == [], seed


# ------------------------------------------------------------------------------------------------------------ rules


def test_keep_last_counts_replaced_ones_however_often_the_stage_was_resumed(found):
    declare(found, "a", {"sft": {"keep_last": 2}})
    made = [publish(found, "a", "sft", at=at) for at in range(4)]
    collect(found)
    made += [publish(found, "a", "sft", at=at) for at in (4, 5)]  # by later processes, which never saw the first
    assert going(found) == {made[1].id, made[2].id}
    assert [item.record.id for item in survey(found).stay] == [one.id for one in made[3:]]


def test_a_teacher_and_a_parent_outlive_every_rule(found):
    """Of a run that replaced them since, read by another run."""
    base = publish(found, "a", "sft", at=0)
    teacher = publish(found, "a", "max[domain=math]", [base.id], at=1)
    publish(found, "b", "mopd", [base.id, teacher.id], at=2)
    publish(found, "a", "sft", at=3)
    publish(found, "a", "max[domain=math]", at=4)
    unneeded = publish(found, "a", "sft", at=5)
    publish(found, "a", "sft", at=6)
    assert going(found) == {unneeded.id, "003-a-0"}
    assert reasons(found, teacher) == ("init of b:mopd, which stays",)


def test_numbers_of_keep_every_do_not_move_when_some_were_deleted(found):
    declare(found, "a", {"sft": {"keep_last": 0, "keep_every": 3}})
    made = [publish(found, "a", "sft", at=at) for at in range(7)]
    collect(found)
    assert [item.record.id for item in survey(found).stay] == [made[2].id, made[5].id, made[6].id]
    publish(found, "a", "sft", at=7)
    publish(found, "a", "sft", at=8)
    assert going(found) == {made[6].id, "007-a-0"}  # the ninth is the third to be kept


def test_the_best_by_a_metric_stays(found):
    declare(found, "a", {"sft": {"keep_last": 0, "keep_best": {"metric": "score"}}})
    made = [
        publish(found, "a", "sft", at=at, score=score) for at, score in enumerate((1, 7, float("nan"), float("inf"), 2))
    ]
    assert going(found) == {one.id for one in made[:-1]} - {made[1].id}
    assert reasons(found, made[1]) == ("keep_best: score 7",)


def test_a_mistyped_metric_costs_no_checkpoint(found):
    declare(found, "a", {"sft": {"keep_last": 0, "keep_best": {"metric": "scoer"}}})
    made = [publish(found, "a", "sft", at=at) for at in range(3)]
    assert going(found) == set()
    assert reasons(found, made[0]) == ("keep_best: none has the metric scoer",)


@pytest.mark.parametrize("text", [None, "{", '{"stages": {"sft": {"retention": {"keep_last": "all"}}}}'])
def test_without_a_readable_rule_nothing_goes(found, text):
    publish(found, "a", "sft", at=0)
    publish(found, "a", "sft", at=1)
    path = found.run("a").path / "pipeline.yaml"
    path.unlink() if text is None else path.write_text(text)
    assert going(found) == set()


# ------------------------------------------------------------------------------------------------- what else holds it


def test_what_another_run_reuses_stays(found):
    old = publish(found, "a", "sft", at=0)
    publish(found, "a", "sft", at=1)
    found.run("b").stage("sft").reuse(found.checkpoint(old.id))
    assert going(found) == set()
    assert reasons(found, old) == ("reused by b:sft",)


def test_a_pin_holds_a_checkpoint_and_all_it_came_from(found):
    base = publish(found, "a", "sft", at=0)
    old = publish(found, "a", "mopd", [base.id], at=1)
    publish(found, "a", "sft", at=2)
    publish(found, "a", "mopd", at=3)
    assert going(found) == {base.id, old.id}
    found.ledger.pin(Pin(old.id, "a", "mopd", "paper"))
    assert going(found) == set()
    assert reasons(found, old) == ("pinned: paper",)
    (found.path / "runs" / ".pins" / f"{old.id}.json").write_text("{")  # a damaged pin still pins
    assert going(found) == set()
    assert found.ledger.unpin(old.id)
    assert going(found) == {base.id, old.id}


def test_half_trained_state_holds_what_it_started_from(found):
    old = publish(found, "a", "sft", at=0)
    publish(found, "a", "sft", at=1)
    begin(found.run("b").stage("mopd"), {"seed": 1}, [old.id])
    assert going(found) == set()


def test_a_checkpoint_that_a_pipeline_names_by_path_stays(found):
    old = publish(found, "a", "sft", at=0)
    publish(found, "a", "sft", at=1)
    tasks = {"own": {"path": f"runs/a/stages/sft/checkpoints/{old.id}/data.jsonl"}}
    found.run("b").write_pipeline({"name": "b", "stages": {"mopd": {"kind": "sft"}}, "tasks": tasks})
    assert going(found) == set()
    assert reasons(found, old) == ("named by path in pipeline.yaml of b",)


def test_a_checkpoint_that_a_pipeline_names_by_a_link_of_the_users_own_stays(found):
    old = publish(found, "a", "sft", at=0)
    publish(found, "a", "sft", at=1)
    (found.path / "best").symlink_to(found.run("a").stage("sft").at(old.id).checkpoint)
    assert going(found) == {old.id}
    stages = {"mopd": {"kind": "opd", "inputs": {"student": "path:best"}}}
    found.run("b").write_pipeline({"name": "b", "stages": stages, "model": {"tokenizer": {"words": ["\0", "x" * 999]}}})
    assert going(found) == set()
    assert reasons(found, old) == ("named by path in pipeline.yaml of b",)


def test_a_model_that_was_read_as_a_folder_is_an_ancestor_by_its_digests(found):
    old = publish(found, "a", "sft", at=0)
    publish(found, "a", "sft", at=1)
    publish(found, "b", "mopd", at=2, by_path=[old])
    assert going(found) == set()


def test_a_run_at_work_is_left_alone_with_all_it_reads(found):
    made = [publish(found, "a", "sft", at=at) for at in range(3)]
    teacher = publish(found, "b", "sft", at=3)
    publish(found, "b", "sft", at=4)
    stage = found.run("a").stage("mopd")
    stage.new_attempt()
    stage.spec.write_text(f'{{"inputs": [{{"source": "{teacher.id}", "path": ""}}]}}')
    with found.run("a").lock():
        sweep = collect(found)
        assert (sweep.go, sweep.notes) == ((), ("run a is at work: nothing of it goes",))
        assert all((found.run("a").stage("sft").at(one.id).checkpoint / RECORD).exists() for one in made)
    assert going(found) == {made[0].id, made[1].id, teacher.id}


def test_while_the_record_of_what_stays_cannot_be_read_no_checkpoint_goes(found):
    base = publish(found, "a", "sft", at=0)
    publish(found, "a", "sft", at=1)
    publish(found, "b", "mopd", [base.id], at=2)
    publish(found, "b", "max[domain=math]", at=3)
    publish(found, "b", "max[domain=math]", at=4)
    (found.run("b").stage("mopd").checkpoint / RECORD).write_text("{")
    sweep = survey(found)
    assert sweep.go == ()
    assert "no checkpoint goes" in sweep.notes[-1]


def test_a_replaced_checkpoint_that_cannot_be_read_stays_and_holds_nothing_up(found):
    old = publish(found, "a", "sft", at=0)
    second = publish(found, "a", "sft", at=1)
    publish(found, "a", "sft", at=2)
    (found.run("a").stage("sft").at(old.id).checkpoint / RECORD).write_text("{")
    assert going(found) == {second.id}


def test_what_lies_behind_a_link_out_of_the_workspace_is_not_touched(found, tmp_path):
    publish(found, "a", "sft", at=0)
    publish(found, "a", "sft", at=1)
    stage = found.run("a").stage("sft")
    output(stage)
    outside = tmp_path / "elsewhere"
    stage.path.rename(outside)
    stage.path.symlink_to(outside)
    assert survey(found).go == ()
