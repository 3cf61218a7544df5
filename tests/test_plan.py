from pathlib import Path

import pytest
from checkpoints import model_folder, safetensors
from recipes import recipe

from opdctl.errors import ConfigError
from opdctl.plan import Decision, PlannedStage, make_plan
from opdctl.settings import FileTask
from opdctl.store import Record, Workspace, write_json
from opdctl.templates import InstanceOverride

CHAIN = ["sft", "max[domain=math]", "max[domain=code]", "fuse", "eval"]
LR = "stages.max.config.train.optimizer.lr"


@pytest.fixture
def run(workspace: Path):
    return Workspace(workspace).run("run")


def plan(run, changes=None, folder=None, **options) -> dict[str, PlannedStage]:
    pipeline = recipe(changes, folder=folder or run.workspace.path)
    return {item.stage.name: item for item in make_plan(pipeline, run, **options).stages}


def decisions(planned: dict[str, PlannedStage]) -> dict[str, str]:
    return {name: str(item.decision) for name, item in planned.items()}


def finish(run, item: PlannedStage) -> None:
    """What a worker and the runner leave of a finished stage."""
    stage, name = run.stage(item.stage.name), item.stage.name
    if item.reuse_from is not None:
        stage.reuse(item.reuse_from)
    if item.decision in (Decision.REUSE, Decision.SKIPPED):
        return
    stage.begin(item.identity, item.parents, resume=False)
    attempt = stage.new_attempt()
    (attempt.output / "model.safetensors").write_text(name)
    values = {"metrics": {}, "labels": {}, "created": "", "opdctl_version": "", "code": "", "argv": [], "seconds": 0.0}
    record = Record(
        id=Workspace.new_record_id(),
        run=run.name,
        stage=name,
        kind=item.stage.settings.kind,
        step=item.total_steps,
        fingerprint=item.fingerprint,
        identity=item.identity,
        parents=list(item.parents),
        **values,
    )
    stage.publish(attempt.output, record)


def carry_out(run, changes=None, names=CHAIN, **options) -> None:
    for name in names:
        finish(run, plan(run, changes, **options)[name])


def half_train(run, name, changes=None, step=2) -> None:
    item = plan(run, changes)[name]
    run.stage(name).begin(item.identity, item.parents, resume=False)
    write_json(run.stage(name).state / "step.json", {"step": step})


# ---------------------------------------------------------------------------------------------- run and reuse


def test_a_new_run_runs_everything_and_a_plan_leaves_no_trace(run, workspace):
    assert decisions(plan(run)) == dict.fromkeys(CHAIN, "run")
    assert list(workspace.iterdir()) == []


def test_a_finished_run_is_reused(run):
    carry_out(run)
    planned = plan(run)
    assert decisions(planned) == dict.fromkeys(CHAIN, "reuse")
    assert planned["sft"].reason == "finished, at step 4"
    assert planned["fuse"].parents[0].record_id == run.stage("sft").record().id


def test_a_change_runs_the_stage_and_exactly_its_dependants(run):
    carry_out(run)
    planned = plan(run, {LR: 0.002})
    assert decisions(planned) == {"sft": "reuse"} | dict.fromkeys(CHAIN[1:], "run")
    assert planned["max[domain=math]"].reason == "config.train.optimizer.lr: 0.001 -> 0.002"
    assert planned["fuse"].reason == "reads max[domain=math], max[domain=code], which run again"


def test_a_change_in_one_domain_runs_its_specialist_the_fusion_and_the_evaluation_only(run, workspace):
    carry_out(run)
    reward = InstanceOverride("", "max[domain=code]", ("config", "unfinished_reward"), -0.5)
    planned = {p.stage.name: p for p in make_plan(recipe(instance_overrides=[reward], folder=workspace), run).stages}
    assert decisions(planned) == {
        "sft": "reuse",
        "max[domain=math]": "reuse",
        "max[domain=code]": "run",
        "fuse": "run",
        "eval": "run",
    }
    assert planned["max[domain=code]"].reason == "config.unfinished_reward: 0.0 -> -0.5"


def test_resources_and_save_intervals_change_nothing(run):
    carry_out(run)
    changes = {"stages.max.resources": {"micro_batch_tokens": 1}, "stages.max.config.train.save_every": 4}
    assert decisions(plan(run, changes)) == dict.fromkeys(CHAIN, "reuse")


def test_rerun_runs_the_stage_and_its_dependants(run):
    carry_out(run)
    planned = plan(run, rerun=["max[domain=code]"])
    assert [name for name, item in planned.items() if item.decision is Decision.RUN] == [
        "max[domain=code]",
        "fuse",
        "eval",
    ]
    assert planned["max[domain=code]"].reason == "asked for with --rerun"


def test_children_of_a_retrained_parent_are_stale_although_no_setting_changed(run):
    carry_out(run)
    finish(run, plan(run, rerun=["max[domain=code]"])["max[domain=code]"])
    planned = plan(run)
    assert decisions(planned) == dict.fromkeys(CHAIN[:3], "reuse") | {"fuse": "run", "eval": "run"}
    assert planned["fuse"].reason == "reads max[domain=code], which is another checkpoint than before"


def test_a_damaged_checkpoint_runs_again_and_says_why(run):
    carry_out(run)
    (run.stage("sft").checkpoint / "model.safetensors").unlink()
    assert "model.safetensors is missing" in plan(run)["sft"].reason


def test_a_corrupt_record_runs_again_and_says_why(run):
    carry_out(run, names=["sft"])
    (run.stage("sft").checkpoint / "record.json").write_text("{")
    assert "record unreadable" in plan(run)["sft"].reason


def test_another_run_with_the_same_settings_is_reused_by_reference(run, workspace):
    carry_out(run)
    other = Workspace(workspace).run("other")
    planned = plan(other)
    assert decisions(planned) == dict.fromkeys(CHAIN, "reuse")
    assert planned["sft"].reason == "finished in run run, stage sft, at step 4"
    carry_out(other)
    assert plan(other)["fuse"].reuse_from is None
    assert other.stage("fuse").record().id == run.stage("fuse").record().id


def test_settings_changed_back_find_the_replaced_checkpoints(run):
    carry_out(run)
    first = run.stage("eval").record().id
    carry_out(run, {LR: 0.002})
    assert decisions(plan(run)) == dict.fromkeys(CHAIN, "reuse")
    carry_out(run)
    assert run.stage("eval").record().id == first


def test_a_changed_revision_of_the_backend_is_told(run, monkeypatch):
    carry_out(run, names=["sft"])
    monkeypatch.setattr("opdctl.backends.embedded.REVISION", "next")
    assert plan(run)["sft"].reason.endswith("-> next")


# ---------------------------------------------------------------------------------------------- half-trained


def test_half_trained_state_is_resumed(run):
    half_train(run, "sft")
    item = plan(run)["sft"]
    assert (item.decision, item.resume_step, item.total_steps) == (Decision.RESUME, 2, 4)


def test_half_trained_state_with_other_settings_is_refused_with_the_difference(run):
    half_train(run, "sft")
    planned = plan(run, {"stages.sft.config.train.optimizer.lr": 0.002})
    assert planned["sft"].decision is Decision.REFUSED
    assert "config.train.optimizer.lr: 0.001 -> 0.002" in planned["sft"].reason
    assert "--rerun 'sft'" in planned["sft"].reason
    assert planned["eval"].decision is Decision.REFUSED


def test_rerun_starts_half_trained_state_anew(run):
    half_train(run, "sft")
    item = plan(run, {"stages.sft.config.train.optimizer.lr": 0.002}, rerun=["sft"])["sft"]
    assert (item.decision, item.resume_step) == (Decision.RUN, None)


@pytest.mark.parametrize(
    ("schedule", "steps", "decision"),
    [("constant", 8, "resume"), ("linear", 8, "refused"), ("constant", 2, "resume"), ("constant", 1, "refused")],
)
def test_steps_may_change_where_no_schedule_depends_on_them(run, schedule, steps, decision):
    key = "stages.sft.config.train"
    before = {f"{key}.optimizer.schedule": schedule}
    half_train(run, "sft", before)
    assert plan(run, before | {f"{key}.max_steps": steps})["sft"].decision == decision


def test_resources_may_change_under_half_trained_state(run):
    half_train(run, "sft")
    assert plan(run, {"stages.sft.resources": {"micro_batch_tokens": 1}})["sft"].decision is Decision.RESUME


def test_half_trained_state_of_another_parent_is_not_resumed(run):
    carry_out(run, names=["sft"])
    half_train(run, "max[domain=math]")
    finish(run, plan(run, rerun=["sft"])["sft"])
    item = plan(run)["max[domain=math]"]
    assert item.decision is Decision.RUN
    assert "half-trained state at step 2 is dropped" in item.reason


def test_scores_of_a_half_done_eval_never_stand_in_the_way(run):
    carry_out(run, names=CHAIN[:-1])
    half_train(run, "eval")
    assert plan(run, {"stages.eval.config.confidence": 0.9})["eval"].decision is Decision.RUN


# ---------------------------------------------------------------------------------------------- selection


def test_only_leaves_all_other_stages_alone(run):
    carry_out(run, names=["sft"])
    planned = plan(run, only=["max[domain=math]"])
    assert decisions(planned) == {
        "sft": "reuse",
        "max[domain=math]": "run",
        "max[domain=code]": "skipped",
        "fuse": "skipped",
        "eval": "skipped",
    }


def test_only_is_refused_where_an_input_is_not_finished(run):
    item = plan(run, only=["max"])["max[domain=code]"]
    assert item.decision is Decision.REFUSED
    assert item.reason == "reads sft, which is not finished and not in --only"


@pytest.mark.parametrize("option", ["only", "rerun"])
def test_a_selector_that_matches_nothing_is_refused(run, option):
    with pytest.raises(ConfigError, match=f"--{option} mx: no stage is called 'mx' .did you mean 'max'"):
        plan(run, **{option: ["mx"]})


# ---------------------------------------------------------------------------------------------- identity of data


def _rows(path: Path, text: str) -> dict:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    name = str(path.relative_to(path.parents[1]))
    return {"tasks.math": FileTask(path=name, prompt="p", answer="a", verifier="exact").model_dump()}


def test_rows_may_move_and_their_content_may_not_change(run, workspace):
    before = _rows(workspace / "here" / "a.jsonl", '{"p": "1", "a": "1"}\n')
    carry_out(run, before)
    moved = _rows(workspace / "there" / "b.jsonl", '{"p": "1", "a": "1"}\n')
    assert decisions(plan(run, moved)) == dict.fromkeys(CHAIN, "reuse")
    changed = _rows(workspace / "there" / "b.jsonl", '{"p": "2", "a": "1"}\n')
    planned = plan(run, changed)
    assert planned["sft"].decision is Decision.RUN
    assert planned["sft"].reason.startswith("tasks.math.data.rows: ")


def test_what_a_task_with_tools_reads_counts_by_its_content(run, workspace):
    for name in ("here", "there"):
        (workspace / name).mkdir()
        (workspace / name / "a.md").write_text("the mill stands at the brook")
    (workspace / "q.jsonl").write_text('{"question": "where?", "answer": "here"}')

    def searched(corpus):
        turns = {"max_turns": 2, "max_turn_tokens": 3, "max_observation_tokens": 3}
        bounded = {f"stages.{stage}.config.rollout.turns": turns for stage in ("max", "fuse", "eval")}
        return bounded | {"tasks.math": {"task": "search", "corpus": corpus, "questions": "q.jsonl"}}

    first, second = (plan(run, searched(corpus))["sft"].fingerprint for corpus in ("here", "there"))
    (workspace / "there" / "a.md").write_text("the mill stands at the lake")
    assert first == second != plan(run, searched("there"))["sft"].fingerprint


def test_generated_rows_count_by_the_version_of_their_generator(run, monkeypatch):
    puzzles = {"tasks.math": {"task": "reasoning_gym", "dataset": "chain_sum"}}
    before = plan(run, puzzles)["sft"].fingerprint
    assert plan(run, puzzles)["sft"].fingerprint == before
    monkeypatch.setattr("opdctl.plan.installed", lambda package: f"another {package}")
    assert plan(run, puzzles)["sft"].fingerprint != before


def test_rows_are_hashed_once(run, workspace, monkeypatch):
    data = _rows(workspace / "here" / "a.jsonl", '{"p": "1", "a": "1"}\n')
    (workspace / "runs").mkdir()
    before = plan(run, data)["sft"].fingerprint
    monkeypatch.setattr("opdctl.digests.sha256", lambda path: pytest.fail(f"{path} is hashed again"))
    assert plan(run, data)["sft"].fingerprint == before


def test_a_model_folder_counts_by_its_content(run, workspace):
    for name in ("here", "there"):
        (model_folder(workspace / name) / "README.md").write_text(name)
    carry_out(run, {"stages.sft.inputs.init": "path:here"}, names=["sft"])
    there = {"stages.sft.inputs.init": "path:there"}
    assert plan(run, there)["sft"].decision is Decision.REUSE
    (workspace / "there" / "model.safetensors").write_bytes(safetensors("w", content=b"dcba"))
    assert plan(run, there)["sft"].decision is Decision.RUN


def test_losses_of_rl_and_opd_stages_are_told(run):
    planned = plan(run)
    assert [name for name, item in planned.items() if item.formula] == ["max[domain=math]", "max[domain=code]", "fuse"]
