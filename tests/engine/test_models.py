"""Which models the embedded engine trains, each a tiny one at random; what is refused is in test_causal_lm.py."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine.models import save_hf
from engine.stages import MODEL, Recorder, run, sft
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from opdctl.backends.contract import InputSpec, Stopped
from opdctl.engine.checkpoint import load_policy
from opdctl.engine.tokenizer import word_tokenizer

WORDS = MODEL["tokenizer"]["words"]
SHAPE = {
    "vocab_size": len(WORDS),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
HEAD = {"head_dim": 8}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
TRAINED = {  # -> do groups share prefixes?
    "llama, tied as SmolLM2": (lambda: LlamaConfig(**SHAPE, tie_word_embeddings=True), True),
    "mistral": (lambda: MistralConfig(**SHAPE, **HEAD), True),
    "qwen2, biased": (lambda: Qwen2Config(**SHAPE), True),
    "qwen3": (lambda: Qwen3Config(**SHAPE, **HEAD), True),
    "qwen3, experts": (lambda: Qwen3MoeConfig(**SHAPE, **HEAD, **EXPERTS), True),
    "gemma3, windows": (lambda: Gemma3TextConfig(**SHAPE, **HEAD, sliding_window=32), True),
}


@pytest.mark.parametrize("name", TRAINED)
def test_it_trains_in_bfloat16_and_its_checkpoint_loads(tmp_path, name):
    config, shares = TRAINED[name]
    save_hf(config(), tmp_path / "base")
    word_tokenizer(WORDS).save_pretrained(tmp_path / "base")
    assert load_policy(tmp_path / "base").shares_prefixes == shares
    spec = sft(tmp_path / "sft", steps=2, train={"precision": "bfloat16"})
    spec = replace(spec, inputs=[InputSpec("init", "base", str(tmp_path / "base"))])
    assert run(spec).metrics["loss"] > 0
    trained = AutoModelForCausalLM.from_pretrained(spec.output)
    assert trained.dtype == torch.bfloat16
    before, after = (load_file(Path(folder, "model.safetensors")) for folder in (tmp_path / "base", spec.output))
    assert before.keys() == after.keys()
    assert all(not torch.equal(before[at].bfloat16(), after[at]) for at in before if at.endswith("_proj.weight"))


def test_a_tied_model_in_bfloat16_ends_after_a_stop_as_an_undisturbed_one(tmp_path):
    save_hf(LlamaConfig(**SHAPE, tie_word_embeddings=True), tmp_path / "base")
    word_tokenizer(WORDS).save_pretrained(tmp_path / "base")
    given = [InputSpec("init", "base", str(tmp_path / "base"))]
    whole, cut = (
        replace(sft(tmp_path / name, steps=4, train={"precision": "bfloat16"}), inputs=given)
        for name in ("whole", "cut")
    )
    run(whole)
    with pytest.raises(Stopped):
        run(cut, Recorder(stop_at=1))
    state = load_file(next(Path(cut.state).glob("step-*")) / "state.safetensors")
    kinds = {name: tensor.dtype for name, tensor in state.items() if "embed_tokens" in name or "lm_head" in name}
    at = "network.model.embed_tokens.weight"  # tied: once
    moments = {f"optimizer.{kind}/{at}": torch.float32 for kind in ("exp_avg", "exp_avg_sq", "step", "master")}
    assert kinds == {f"policy.{at}": torch.bfloat16, **moments}
    run(cut)
    published = [Path(spec.output, "model.safetensors").read_bytes() for spec in (whole, cut)]
    assert published[0] == published[1]
