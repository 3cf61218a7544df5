"""Offspring of one checkpoint are told from strangers, and a model from itself: by records, else by weights."""

import json

import pytest
import torch
from checkpoints import record
from gate.models import CHAIN, WORDS, copy, distillation, judged, opd_config, save, stage, verdict
from safetensors.torch import load_file, save_file

from opdctl.gate.folders import Files
from opdctl.gate.origin import nearness
from opdctl.store import Parent, Workspace
from opdctl.verdicts import Outcome


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("models")
    save(made / "base")
    save(made / "tuned", noise=0.3)
    save(made / "stranger", seed=1)
    save(made / "tied", tie_word_embeddings=True)
    return made


def of(folder, teacher, check, student="base"):
    return verdict(distillation(folder, folder / student, teacher), check)


# --------------------------------------------------------------------------------------------------- the same model


def test_a_teacher_whose_path_points_at_the_student_is_refused(folder):
    found = of(folder, folder / "base", "same_model")
    assert found.outcome is Outcome.REFUSE
    assert "student and teacher are the same folder" in found.evidence


def test_a_copy_of_the_student_under_another_name_is_refused_by_its_weights(folder, tmp_path):
    twin = copy(folder / "base", "twin-source").rename(tmp_path / "twin")
    found = of(folder, twin, "same_model")
    assert found.outcome is Outcome.REFUSE
    assert found.evidence == "the weights of both are equal"
    several = distillation(folder, folder / "base", twin, folder / "tuned")
    assert verdict(several, "same_model", "base -> twin").outcome is Outcome.REFUSE
    assert verdict(several, "same_model", "base -> tuned").outcome is Outcome.GO


def store(folder, of, change):
    """A copy of a model, its tensors in two files with an index."""
    made = copy(of, f"{folder.name}-source").rename(folder)
    tensors = load_file(made / "model.safetensors")
    change(tensors)
    (made / "model.safetensors").unlink()
    names = {name: f"model-{number % 2}.safetensors" for number, name in enumerate(tensors)}
    for file in set(names.values()):
        save_file({name: tensors[name] for name, own in names.items() if own == file}, made / file)
    (made / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    return made


def test_the_students_weights_in_other_files_are_still_its_own(folder, tmp_path):
    split = store(tmp_path / "split", folder / "base", lambda tensors: None)
    assert of(folder, split, "same_model").outcome is Outcome.REFUSE
    other = store(tmp_path / "other", folder / "base", lambda tensors: tensors["model.norm.weight"].add_(1))
    assert of(folder, other, "same_model").outcome is Outcome.GO


@pytest.mark.parametrize(("shift", "outcome"), [(0.0, Outcome.REFUSE), (1.0, Outcome.GO)])
def test_an_output_matrix_counts_only_where_it_is_not_the_embeddings(folder, tmp_path, shift, outcome):
    """Of models that tie both, some folders store it once more."""

    def untie(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + shift

    untied = store(tmp_path / "untied", folder / "tied", untie)
    assert of(folder, untied, "same_model", student="tied").outcome is outcome


def test_one_changed_weight_outside_of_the_samples_makes_two_models(folder, tmp_path):
    other = copy(folder / "base", "changed-source").rename(tmp_path / "changed")
    weights = other / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1  # the end of a norm, which is no matrix
    weights.write_bytes(content)
    assert of(folder, other, "same_model").outcome is Outcome.GO


def test_a_student_named_as_one_of_its_teachers_is_meant(folder):
    several = distillation(folder, folder / "base", folder / "base", folder / "tuned")
    found = verdict(several, "same_model", "base -> base")
    assert found.outcome is Outcome.GO
    assert "named as one of its teachers" in found.evidence


def test_a_stage_that_is_still_to_run_cannot_teach_itself(folder, tmp_path):
    later = tmp_path / "later"
    gate = {"stand_ins": {"0": str(folder / "base"), "1": str(folder / "base")}}
    assert verdict(distillation(folder, later, later, gate=gate), "same_model").outcome is Outcome.REFUSE
    other = distillation(folder, later, tmp_path / "too", gate=gate)  # both begin with the base, and will differ
    assert not [one for one in judged(other) if one.check in ("same_model", "origin")]


def test_a_model_merged_with_itself_is_warned_about(folder):
    spec = stage(folder, "merge", [("models", folder / "base"), ("models", folder / "base")])
    assert verdict(spec, "same_model").outcome is Outcome.WARN


# ------------------------------------------------------------------------------------------------------- by weights


def test_weights_tell_offspring_from_strangers(folder):
    found = of(folder, folder / "tuned", "origin")
    assert found.outcome is Outcome.GO
    assert found.values["cosine"] > 0.9
    found = of(folder, folder / "stranger", "origin")
    assert found.outcome is Outcome.WARN
    assert abs(found.values["cosine"]) < 0.2
    assert "two origins" in found.evidence


def test_strangers_are_not_merged(folder):
    spec = stage(folder, "merge", [("models", folder / "base"), ("models", folder / "stranger")])
    assert verdict(spec, "origin").outcome is Outcome.REFUSE


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_of_another_precision_are_compared_as_numbers(folder, tmp_path, dtype):
    other = save(tmp_path / "half", noise=0.3, dtype=dtype)
    near = nearness(Files(folder / "tuned"), Files(other))
    assert near is not None
    assert near.cosine == pytest.approx(1, abs=1e-4)
    assert near.distance < 0.01


def test_a_network_of_another_shape_has_another_origin(folder, tmp_path):
    other = save(tmp_path / "wide", hidden_size=24, intermediate_size=40)
    found = of(folder, other, "origin")
    assert found.outcome is Outcome.WARN
    assert "no weights of one name and shape" in found.evidence


def test_weights_in_several_files_are_found_by_their_index(folder, tmp_path):
    split = store(tmp_path / "split", folder / "tuned", lambda tensors: None)
    files = Files(split)
    assert files.rows == len(WORDS)
    near = nearness(Files(folder / "tuned"), files)
    assert near is not None
    assert near.cosine == pytest.approx(1)


def test_cut_weights_are_told_apart_and_raise_nothing(folder, tmp_path):
    cut = copy(folder / "tuned", "cut-source").rename(tmp_path / "cut")
    content = (cut / "model.safetensors").read_bytes()
    (cut / "model.safetensors").write_bytes(content[:100])
    assert of(folder, cut, "origin").outcome is Outcome.WARN


# ------------------------------------------------------------------------------------------------------- by records


def publish(workspace, folder, name, parents, *, seed=0):
    stage_dir = workspace.run("r").stage(name)
    output = copy(folder, f"{name}-output")
    made = record(f"id-{name}", stage=name, run="r", parents=(), identity={"seed": seed})
    stage_dir.publish(output, made.__class__(**{**made.__dict__, "parents": parents}))
    return stage_dir.checkpoint


def test_records_that_meet_in_one_checkpoint_prove_one_origin(folder, tmp_path):
    """Even where training moved the weights far apart."""
    workspace = Workspace(tmp_path)
    for name in ("base", "tuned", "stranger"):
        copy(folder / name, f"{name}-copy").rename(tmp_path / name)
    publish(workspace, tmp_path / "base", "sft", [Parent("init", "model:", "model:")])
    ours = [Parent("init", "sft", "stage:sft", "id-sft")]
    student = publish(workspace, tmp_path / "tuned", "student", ours)
    teacher = publish(workspace, tmp_path / "stranger", "max", ours)
    spec = stage(
        tmp_path,
        "opd",
        [("student", student), ("teachers", teacher, {"domain": "t"})],
        config=opd_config(["t"]),
        tasks={"t": CHAIN},
    )
    found = verdict(spec, "origin")
    assert (found.outcome, found.evidence) == (Outcome.GO, "both descend from sft of run r")


def test_a_common_teacher_is_no_common_origin(folder, tmp_path):
    """Only inputs whose weights are handed on count; new models of two seeds are two models."""
    workspace = Workspace(tmp_path)
    for name in ("base", "tuned", "stranger"):
        copy(folder / name, f"{name}-again").rename(tmp_path / name)
    publish(workspace, tmp_path / "base", "sft", [Parent("init", "path:x", "path:x")])
    taught = [Parent("init", "model:", "model:"), Parent("teachers", "sft", "stage:sft", "id-sft")]
    student = publish(workspace, tmp_path / "tuned", "one", taught, seed=0)
    teacher = publish(workspace, tmp_path / "stranger", "two", taught, seed=1)
    found = verdict(distillation(tmp_path, student, teacher), "origin")
    assert found.outcome is Outcome.WARN
    assert "no record joins them" in found.evidence
