import json

import pytest

from opdctl.backends.verl import progress
from opdctl.console.metrics import KEY_METRICS


def report(step, **data):
    return json.dumps({"step": step, "data": data})


def test_steps_of_training_are_told_and_validations_and_torn_lines_are_not():
    lines = [
        report(0, **{"val-core/general/acc/mean@1": 0.1}),
        report(1, **{"training/global_step": 1, "critic/rewards/mean": 0.5}),
        '{"step": 2, "data": {"training/glo',
        "[]",
    ]
    assert list(progress.trained("rlvr", lines)) == [
        progress.Trained(1, {"reward": 0.5, "verl/training/global_step": 1.0})
    ]


def test_every_metric_is_told_under_one_name():
    data = {"actor/loss": 1.0, "actor/pg_loss": 2.0, "actor/kl_loss": 0.1, "perf/mfu/actor": 0.3, "flag": "text"}
    assert progress.renamed("rlvr", data) == {"loss": 1.0, "reference_kl": 0.1, "verl/perf/mfu/actor": 0.3}


def test_the_plug_ins_own_metrics_have_the_engines_names_and_count_before_verls():
    data = {"response_length/clip_ratio": 0.5, "opdctl/truncated": 0.25, "opdctl/accuracy": 1.0}
    assert progress.renamed("rlvr", data) == {"truncated": 0.25, "accuracy": 1.0}


@pytest.mark.parametrize("kind", ["sft", "rlvr", "opd"])
def test_what_the_display_shows_first_has_a_name_of_verls(kind):
    assert KEY_METRICS[kind][0][0] in progress.NAMES[kind].values()


def test_throughput_counts_the_tokens_that_were_drawn():
    numbers = {
        "response_length/mean": 30.0,
        "prompt_length/mean": 10.0,
        "perf/total_num_tokens": 800,
        "perf/time_per_step": 2.0,
    }
    assert progress.renamed("opd", numbers)["tokens_per_s"] == 300.0


def test_lines_are_read_once_whole_and_from_the_start_of_a_file_begun_anew(tmp_path):
    path = tmp_path / "verl.jsonl"
    lines = progress.Lines(path)
    assert lines.read() == []
    path.write_text("one\ntwo\nthr")
    assert lines.read() == ["one", "two"]
    with path.open("a") as stream:
        stream.write("ee\n")
    assert lines.read() == ["three"]
    path.write_text("new\n")
    assert lines.read() == ["new"]


@pytest.mark.parametrize(
    ("line", "step"),
    [
        ("(TaskRunnerV1 pid=1) INFO:Resuming from /c/global_step_6, setting global step to 6", 6),
        ("Found latest checkpoint: /c/global_step_40 (step 40)", 40),
        ("(TaskRunnerV1 pid=1) INFO:2026-11-30 06:51:45,923:Training from scratch", 0),
        ("Checkpoint tracker file does not exist: /c/latest_checkpointed_iteration.txt", 0),
        ("step:4 - actor/loss:0.1", None),
    ],
)
def test_verls_log_says_where_it_starts(line, step):
    assert progress.start_step(["something else", line]) == step


def test_the_last_error_of_a_log_is_found_behind_rays_prefix_and_colours():
    text = "ValueError: an earlier one\n\x1b[36m(TaskRunnerV1 pid=7)\x1b[0m torch.OutOfMemoryError: no room\nEnd\n"
    assert progress.last_error(text) == "torch.OutOfMemoryError: no room"
    assert progress.last_error("all is well") == ""


@pytest.mark.parametrize("kind", ["rlvr", "opd"])
@pytest.mark.parametrize("theirs", ["oob_ratio", "ratio_fraction_high"])
def test_tokens_that_verls_mismatch_rule_cuts_are_counted_as_the_engines_are(kind, theirs):
    found = progress.renamed(kind, {f"rollout_corr/rollout_is_{theirs}": 0.9, "rollout_corr/rollout_is_mean": 1.0})
    assert found == {"mismatch_fraction": 0.9, "verl/rollout_corr/rollout_is_mean": 1.0}
