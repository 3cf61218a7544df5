import hashlib
import json
import re
from pathlib import Path

import pytest
import torch
from engine.models import WORDS, new_model, save_hf, tiny_policy
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma3Config, LlamaConfig, Qwen3Config, Qwen3VLConfig

from opdctl.engine.checkpoint import load_policy, load_tokenizer, load_vocabulary, new_policy, save_policy
from opdctl.engine.qwen3 import Qwen3Policy
from opdctl.errors import OpdctlError

torch.set_num_threads(1)

SHAPE = {
    "vocab_size": len(WORDS),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "eos_token_id": 2,
}


@pytest.fixture
def folder(tmp_path) -> Path:
    save_policy(*tiny_policy(), tmp_path, dtype=torch.float32)
    return tmp_path


@pytest.fixture(params=[Qwen3Config, LlamaConfig])
def any_folder(request, tmp_path) -> Path:
    """Once a folder for Qwen3Policy, once one for CausalLMPolicy."""
    save_hf(request.param(**SHAPE), tmp_path)
    return tmp_path


def edit_json(path: Path, **values) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def edit_weights(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir() if path.is_file()}


def test_a_new_policy_is_made_by_its_seed_alone():
    state = torch.get_rng_state()
    first, again, other = (new_policy(new_model(), seed)[0].state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["model.embed_tokens.weight"], other["model.embed_tokens.weight"])
    assert torch.equal(state, torch.get_rng_state())


def test_a_new_policy_has_the_documented_spread():
    policy, _ = new_policy(new_model(hidden_size=64, intermediate_size=256, tie_word_embeddings=False), 0)
    deviations = {name: float(weight.detach().std()) for name, weight in policy.named_parameters() if weight.dim() == 2}
    layer = "model.layers.1."
    assert deviations["model.embed_tokens.weight"] == pytest.approx(0.02, rel=0.1)
    assert deviations["lm_head.weight"] == pytest.approx(0.02, rel=0.1)
    assert deviations[layer + "mlp.up_proj.weight"] == pytest.approx(64**-0.5, rel=0.1)
    assert deviations[layer + "mlp.down_proj.weight"] == pytest.approx(256**-0.5 / 2, rel=0.1)
    assert deviations[layer + "self_attn.o_proj.weight"] == pytest.approx(32**-0.5 / 2, rel=0.1)


def test_a_saved_policy_loads_here_and_in_transformers(folder):
    expected = tiny_policy()[0].state_dict()
    policy, (model, info) = load_policy(folder), AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert isinstance(policy, Qwen3Policy)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    for name, tensor in expected.items():
        assert torch.equal(policy.state_dict()[name], tensor)
        assert torch.equal(model.state_dict()[name], tensor)
    assert model.generation_config.eos_token_id == 2
    assert AutoTokenizer.from_pretrained(folder).decode([3, 4]) == "w3 w4"


def test_equal_weights_give_equal_bytes(any_folder, tmp_path):
    for source, target in ((any_folder, tmp_path / "first"), (tmp_path / "first", tmp_path / "second")):
        save_policy(load_policy(source), load_tokenizer(source), target, dtype=torch.float32)
    assert digests(tmp_path / "first") == digests(tmp_path / "second")


def test_weights_are_saved_in_the_precision_asked_for(tmp_path):
    policy, tokenizer = tiny_policy()
    save_policy(policy, tokenizer, tmp_path, dtype=torch.bfloat16)
    saved = load_file(tmp_path / "model.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {torch.bfloat16}
    assert all(torch.equal(saved[name], tensor.bfloat16()) for name, tensor in policy.state_dict().items())
    assert AutoModelForCausalLM.from_pretrained(tmp_path).dtype == torch.bfloat16
    assert load_policy(tmp_path).head().dtype == torch.float32


def test_sharded_weights_load(tmp_path):
    for config in (Qwen3Config(**SHAPE), LlamaConfig(**SHAPE)):
        folder = tmp_path / config.model_type
        model = save_hf(config, folder, max_shard_size="20KB")
        assert len(list(folder.glob("*.safetensors"))) > 2
        policy = load_policy(folder)
        expected = model.get_input_embeddings().weight
        assert any(torch.equal(weight, expected) for weight in policy.parameters())
        next(folder.glob("model-00002*.safetensors")).unlink()
        with pytest.raises(OpdctlError, match="names files that are not in the folder: model-00002"):
            load_policy(folder)


def test_eos_ids_are_the_union_of_all_that_name_one(folder):
    edit_json(folder / "generation_config.json", eos_token_id=[7, 5])
    edit_json(folder / "config.json", eos_token_id=5, pad_token_id=None)
    policy = load_policy(folder)
    assert policy.eos_ids == (2, 7, 5)  # the tokenizer's first
    assert policy.pad_id == 0  # the generation config's
    save_policy(policy, AutoTokenizer.from_pretrained(folder), folder / "again", dtype=torch.float32)
    assert load_policy(folder / "again").eos_ids == (2, 7, 5)


def test_a_special_token_outside_the_vocabulary_is_refused(folder):
    edit_json(folder / "generation_config.json", eos_token_id=[2, 500])
    with pytest.raises(OpdctlError, match=r"\[500\] are outside the vocabulary of 29 tokens"):
        load_policy(folder)


def test_a_model_that_knows_no_eos_is_refused(folder):
    for name in ("config.json", "generation_config.json"):
        edit_json(folder / name, eos_token_id=None)
    edit_json(folder / "tokenizer_config.json", eos_token=None)
    with pytest.raises(OpdctlError, match="end-of-sequence") as caught:
        load_policy(folder)
    assert "generation_config.json" in caught.value.hint


def test_pickled_weights_are_refused_with_the_way_to_convert_them(any_folder):
    (any_folder / "model.safetensors").unlink()
    (any_folder / "pytorch_model.bin").write_bytes(b"never read")
    with pytest.raises(OpdctlError, match="never unpickles") as caught:
        load_policy(any_folder)
    assert "save_pretrained" in caught.value.hint


def test_what_is_missing_is_named(any_folder, tmp_path):
    with pytest.raises(OpdctlError, match="no such folder"):
        load_policy(tmp_path / "elsewhere")
    (any_folder / "model.safetensors").unlink()
    with pytest.raises(OpdctlError, match="no weights"):
        load_policy(any_folder)
    (any_folder / "config.json").unlink()
    with pytest.raises(OpdctlError, match=r"no config\.json"):
        load_policy(any_folder)


@pytest.mark.parametrize("keep", [0, 5, 200, -1])
def test_a_truncated_file_is_refused(any_folder, keep):
    path = any_folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(OpdctlError, match="not a whole safetensors file"):
        load_policy(any_folder)


def test_a_missing_tensor_is_refused(any_folder):
    edit_weights(any_folder, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(OpdctlError, match=r"missing.*layers\.1\.mlp\.up_proj"):
        load_policy(any_folder)


def test_an_unexpected_tensor_is_refused(any_folder):
    edit_weights(any_folder, lambda tensors: tensors.update({"model.extra.weight": torch.zeros(2)}))
    with pytest.raises(OpdctlError, match=r"model\.extra\.weight"):
        load_policy(any_folder)


def test_another_shape_is_refused(any_folder):
    edit_weights(any_folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(33)}))
    with pytest.raises(OpdctlError, match=r"model\.norm\.weight"):
        load_policy(any_folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_refused(any_folder, value):
    edit_weights(any_folder, lambda tensors: tensors["model.norm.weight"][3].fill_(value))
    with pytest.raises(OpdctlError, match=r"NaN or infinite: .*norm\.weight"):
        load_policy(any_folder)


def test_weights_of_whole_numbers_are_refused(any_folder):
    def quantize(tensors):
        tensors["model.layers.0.mlp.up_proj.weight"] = tensors["model.layers.0.mlp.up_proj.weight"].to(torch.int32)

    edit_weights(any_folder, quantize)
    with pytest.raises(
        OpdctlError, match=r"nothing can be computed with: model\.layers\.0\.mlp\.up_proj\.weight \(I32\)"
    ):
        load_policy(any_folder)


ODD = [
    {"hidden_size": "a"}, {"num_hidden_layers": None}, {"vocab_size": [3]}, {"rope_parameters": 3},
    {"rope_parameters": {"rope_type": "default", "rope_theta": "a"}}, {"num_attention_heads": 0}, {"hidden_size": -4},
    {"layer_types": ["none"]}, {"model_type": 3}, {"model_type": "none"}, {"head_dim": 0}, {"hidden_act": "none"},
    {"hidden_act": 3}, {"rms_norm_eps": "a"}, {"eos_token_id": "a"}, {"eos_token_id": [[1]]}, {"dtype": "none"},
    {"num_key_value_heads": 3}, {"max_position_embeddings": "a"}, {"pad_token_id": "a"}, {"vocab_size": 10**9},
]  # fmt: skip


@pytest.mark.parametrize("odd", ODD, ids=str)
def test_a_value_of_the_configuration_that_makes_no_model_is_an_error_of_the_folder(any_folder, odd):
    edit_json(any_folder / "config.json", **odd)
    with pytest.raises(OpdctlError, match=re.escape(str(any_folder))) as caught:
        load_policy(any_folder)
    assert "config.json" in str(caught.value) + caught.value.hint


@pytest.mark.parametrize("odd", [{"watermarking_config": 5}, {"compile_config": 5}, {"cache_implementation": "none"}])
def test_a_value_of_the_generation_configuration_that_transformers_rejects_is_an_error_of_the_file(folder, odd):
    edit_json(folder / "generation_config.json", **odd)
    with pytest.raises(OpdctlError, match=re.escape(str(folder / "generation_config.json"))) as caught:
        load_policy(folder)
    assert caught.value.hint


def test_a_tied_model_with_an_output_matrix_of_its_own_is_refused_unless_equal(folder):
    edit_weights(
        folder, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()})
    )
    assert "lm_head.weight" not in load_policy(folder).state_dict()
    edit_weights(folder, lambda tensors: tensors["lm_head.weight"][0].add_(1))
    with pytest.raises(OpdctlError, match="ties lm_head.weight"):
        load_policy(folder)


def test_code_in_the_folder_is_never_run(folder):
    (folder / "modeling.py").write_text("raise SystemExit('ran')")
    remote = {"AutoConfig": "modeling.Config", "AutoModelForCausalLM": "modeling.Model"}
    edit_json(folder / "config.json", model_type="of_its_own", auto_map=remote)
    with pytest.raises(OpdctlError, match="never runs"):
        load_policy(folder)


@pytest.mark.parametrize(
    "change",
    [
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}},
        {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1, "layer_types": None},
        {"hidden_act": "gelu"},
    ],
)
def test_a_qwen3_variant_that_the_tight_forward_does_not_cover_goes_through_transformers(folder, change):
    edit_json(folder / "config.json", **change)
    policy = load_policy(folder)
    assert not isinstance(policy, Qwen3Policy)


@pytest.mark.parametrize("config", [Gemma3Config, Qwen3VLConfig])
def test_a_model_of_text_and_images_is_refused_here_and_its_vocabulary_known_to_other_backends(folder, config):
    config(text_config={"vocab_size": len(WORDS) + 3, "pad_token_id": 0, "eos_token_id": 2}).save_pretrained(folder)
    with pytest.raises(OpdctlError, match=config.__name__) as refused:
        load_policy(folder)
    assert "backend: verl" in refused.value.hint
    _, eos_ids, width = load_vocabulary(folder)
    assert eos_ids == (2,)
    assert width == len(WORDS) + 3
