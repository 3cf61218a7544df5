"""Merge stages through `embedded.run`, on small trained and made models."""

import json
from pathlib import Path

import pytest
import torch
from engine.models import WORDS, new_model, tiny_policy
from engine.stages import Recorder, run, spec_of
from safetensors.torch import load_file, save_file

from opdctl.backends.contract import InputSpec, Stopped
from opdctl.engine import merge
from opdctl.engine.checkpoint import load_policy, load_tokenizer, save_policy
from opdctl.engine.tokenizer import word_tokenizer
from opdctl.errors import StageRefused

LINEAR = {"method": "linear"}
LONGCAT = {
    "method": "longcat_fusion", "norm": "l2", "scope": "model", "drop_rate": 0.5, "rescale": True, "combine": "sum",
    "scale": 1.0,
}  # fmt: skip
METHODS = [
    LINEAR,
    {"method": "convex"},
    {"method": "task_arithmetic", "scale": 0.5},
    {"method": "ties", "density": 0.3, "scale": 1.0},
    {"method": "dare", "drop_rate": 0.5, "scale": 0.7},
    {"method": "sce", "select": 0.2},
    LONGCAT,
    LONGCAT | {"scope": "tensor"},
]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> list[Path]:
    folders = [tmp_path_factory.mktemp("models") / str(seed) for seed in range(3)]
    for seed, folder in enumerate(folders):
        save_policy(*tiny_policy(seed), folder, dtype=torch.float32)
    return folders


def spec(folder, how, models, *, base=None, weights=None, precision="float32", **more):
    weights = weights or [1.0] * len(models)
    inputs = [
        InputSpec("models", f"m{i}", str(m), weight=w) for i, (m, w) in enumerate(zip(models, weights, strict=True))
    ]
    if base is not None:
        inputs.append(InputSpec("base", "base", str(base)))
    return spec_of(folder, "merge", {"merge": how, "precision": precision}, inputs, **more)


def weights_of(folder):
    return load_file(Path(folder) / "model.safetensors")


def with_base(how, models):
    return {} if how["method"] in ("linear", "convex") else {"base": models[0]}


@pytest.mark.parametrize("how", METHODS, ids=str)
def test_a_merge_is_a_model_with_the_shapes_of_its_inputs(tmp_path, models, how):
    given = spec(tmp_path / "merge", how, models[1:], weights=[0.5, 0.5] if how["method"] == "convex" else None,
                 **with_base(how, models))  # fmt: skip
    result = run(given)
    merged = weights_of(given.output)
    assert {n: t.shape for n, t in merged.items()} == {n: t.shape for n, t in weights_of(models[0]).items()}
    assert load_policy(given.output).eos_ids == (2,)
    assert load_tokenizer(given.output).get_vocab() == load_tokenizer(models[0]).get_vocab()
    assert result.metrics["models"] == 2
    assert any(not torch.equal(merged[n], t) for n, t in weights_of(models[0]).items())


@pytest.mark.parametrize("how", METHODS, ids=str)
def test_the_same_merge_gives_the_same_bytes_however_it_is_cut(tmp_path, models, how, monkeypatch):
    given = [spec(tmp_path / name, how, models, **with_base(how, models)) for name in "ab"]
    run(given[0])
    monkeypatch.setattr(merge, "PART_BYTES", 4 * 4 * 100)
    run(given[1])
    first, second = (weights_of(one.output) for one in given)
    for name, tensor in first.items():
        torch.testing.assert_close(second[name], tensor, rtol=1e-6, atol=1e-6)


def test_linear_takes_the_weights_of_the_inputs(tmp_path, models):
    given = spec(tmp_path / "merge", LINEAR, models[:2], weights=[1.0, 3.0])
    run(given)
    first, second = weights_of(models[0]), weights_of(models[1])
    for name, tensor in weights_of(given.output).items():
        torch.testing.assert_close(tensor, (first[name] + 3 * second[name]) / 4)


def test_another_seed_drops_other_entries(tmp_path, models):
    how = {"method": "dare", "drop_rate": 0.5, "scale": 1.0}
    given = [spec(tmp_path / str(seed), how, models[1:], base=models[0], seed=seed) for seed in (0, 0, 1)]
    merged = []
    for one in given:
        run(one)
        merged.append(Path(one.output, "model.safetensors").read_bytes())
    assert merged[0] == merged[1] != merged[2]


def test_tensors_of_one_shape_drop_different_entries(tmp_path, models):
    given = spec(tmp_path / "m", {"method": "dare", "drop_rate": 0.5, "scale": 1.0}, models[1:2], base=models[0])
    run(given)
    base, merged = weights_of(models[0]), weights_of(given.output)
    first, second = (merged[name] == base[name] for name in (f"model.layers.{n}.mlp.up_proj.weight" for n in (0, 1)))
    assert 0.3 < float(first.float().mean()) < 0.7
    assert not torch.equal(first, second)


def test_the_norm_of_a_whole_model_is_over_all_its_tensors(tmp_path, models):
    how = LONGCAT | {"drop_rate": 0.0, "norm": "l1"}
    given = spec(tmp_path / "merge", how, models[1:], base=models[0])
    run(given)
    base, *thetas = (weights_of(folder) for folder in models)
    norms = [sum(float((theta[n] - base[n]).abs().sum()) for n in base) for theta in thetas]
    name = "model.layers.0.mlp.up_proj.weight"
    taus = [(theta[name] - base[name]) * (sum(norms) / 2 / own) for theta, own in zip(thetas, norms, strict=True)]
    positive = taus[0] + taus[1] >= 0
    expected = base[name] + sum(torch.where(positive, tau.clamp(min=0), tau.clamp(max=0)) for tau in taus)
    torch.testing.assert_close(weights_of(given.output)[name], expected, rtol=1e-4, atol=1e-5)


def test_the_result_is_published_in_the_declared_type(tmp_path, models):
    given = spec(tmp_path / "merge", LINEAR, models, precision="bfloat16")
    run(given)
    assert {tensor.dtype for tensor in weights_of(given.output).values()} == {torch.bfloat16}
    assert json.loads(Path(given.output, "config.json").read_text())["dtype"] == "bfloat16"
    wide = spec(tmp_path / "wide", LINEAR, models)
    run(wide)
    for name, tensor in weights_of(wide.output).items():
        assert torch.equal(weights_of(given.output)[name], tensor.to(torch.bfloat16))


def test_a_new_model_can_be_the_base(tmp_path, models):
    how = {"method": "task_arithmetic", "scale": 1.0}
    made = new_model().model_dump(mode="json")
    given = spec(tmp_path / "merge", how, models[:1], base="", new_model=made)
    run(given)
    for name, tensor in weights_of(given.output).items():
        torch.testing.assert_close(tensor, weights_of(models[0])[name], rtol=1e-5, atol=1e-6)


def test_a_stopped_merge_starts_anew(tmp_path, models):
    given = spec(tmp_path / "merge", LINEAR, models)
    with pytest.raises(Stopped):
        run(given, Recorder(stop_at=3))
    whole = spec(tmp_path / "whole", LINEAR, models)
    run(given)
    run(whole)
    assert Path(given.output, "model.safetensors").read_bytes() == Path(whole.output, "model.safetensors").read_bytes()


# ------------------------------------------------------------------------------------------------------- refusals


def changed(source, folder, edit):
    """A copy of a model whose tensors `edit` changes."""
    folder.mkdir()
    for path in source.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_another_shape_is_refused_by_the_key_that_differs(tmp_path, models):
    save_policy(*tiny_policy(0, intermediate_size=40), tmp_path / "other", dtype=torch.float32)
    with pytest.raises(StageRefused, match="m1 is another network than m0: intermediate_size of config.json"):
        run(spec(tmp_path / "merge", LINEAR, [models[0], tmp_path / "other"]))


def test_another_vocabulary_is_refused_by_its_first_id(tmp_path, models):
    other = changed(models[1], tmp_path / "other", lambda tensors: None)
    word_tokenizer([*WORDS[:3], "else", *WORDS[4:]]).save_pretrained(other)
    with pytest.raises(StageRefused, match="id 3 is 'w3' to the policy and 'else' to it"):
        run(spec(tmp_path / "merge", LINEAR, [models[0], other]))


def test_a_missing_tensor_is_refused_by_name(tmp_path, models):
    name = "model.layers.1.mlp.up_proj.weight"
    other = changed(models[1], tmp_path / "other", lambda tensors: tensors.pop(name))
    with pytest.raises(StageRefused, match=rf"m1 has other tensors than m0: {name}; {name} is absent"):
        run(spec(tmp_path / "merge", LINEAR, [models[0], other]))


def test_nan_is_refused_by_model_and_tensor(tmp_path, models):
    name = "model.norm.weight"
    other = changed(models[1], tmp_path / "other", lambda tensors: tensors[name].fill_(float("nan")))
    with pytest.raises(StageRefused, match=f"m1: {name} holds NaN or infinity"):
        run(spec(tmp_path / "merge", LINEAR, [models[0], other]))


def test_a_tied_model_may_hold_its_output_matrix_too(tmp_path, models):
    embeddings = "model.embed_tokens.weight"
    same = changed(models[1], tmp_path / "same", lambda t: t.update({"lm_head.weight": t[embeddings].clone()}))
    given, plain = spec(tmp_path / "a", LINEAR, [models[0], same]), spec(tmp_path / "b", LINEAR, models[:2])
    run(given)
    run(plain)
    assert Path(given.output, "model.safetensors").read_bytes() == Path(plain.output, "model.safetensors").read_bytes()


def test_an_output_matrix_that_belies_the_tie_is_refused(tmp_path, models):
    other = changed(
        models[1], tmp_path / "o", lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1})
    )
    with pytest.raises(StageRefused, match="m1: config.json ties lm_head.weight"):
        run(spec(tmp_path / "merge", LINEAR, [models[0], other]))
