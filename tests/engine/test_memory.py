"""What a training step keeps: recomputed activations."""

from pathlib import Path

import pytest
import torch
from engine.models import save_hf
from engine.stages import Recorder, run, sft
from transformers import GPT2Config, LlamaConfig, Qwen3Config

from opdctl.engine.batch import Sequence
from opdctl.engine.checkpoint import load_policy

SHAPE = {
    "vocab_size": 29,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CONFIGS = {
    "llama": lambda: LlamaConfig(**SHAPE),
    "own-qwen3": lambda: Qwen3Config(**SHAPE),
    "gpt2-dropout": lambda: GPT2Config(vocab_size=29, n_embd=32, n_layer=4, n_head=4, n_positions=64, eos_token_id=2),
}
SEQUENCES = [Sequence((3, 4, 5, 6), tuple(range(3, 23)), 1), Sequence((3, 4, 5, 9), tuple(range(4, 24)), 1)]


@pytest.mark.parametrize("name", CONFIGS)
def test_recomputed_activations_give_the_same_gradients_and_keep_less(tmp_path, name):
    save_hf(CONFIGS[name](), tmp_path)
    gradients, kept = [], []
    for recompute in (False, True):
        policy = load_policy(tmp_path)
        policy.train()
        if recompute:
            policy.checkpoint_activations()
        storages: dict[int, int] = {}

        def keep(tensor: torch.Tensor, storages: dict[int, int] = storages) -> torch.Tensor:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            hidden = policy.hidden(policy.batch(SEQUENCES))
        hidden.square().sum().backward()
        gradients.append({n: w.grad for n, w in policy.named_parameters() if w.grad is not None})
        kept.append(sum(storages.values()) - sum(w.untyped_storage().nbytes() for w in policy.parameters()))
    for at in gradients[0]:
        torch.testing.assert_close(gradients[1][at], gradients[0][at], atol=0, rtol=0)
    assert gradients[0].keys() == gradients[1].keys()
    assert kept[1] < kept[0] / 2


def test_a_stage_that_recomputes_learns_the_same_weights(tmp_path):
    plain, saving = sft(tmp_path / "plain"), sft(tmp_path / "saving", resources={"gradient_checkpointing": True})
    kept = [run(spec, Recorder()).metrics["loss"] for spec in (plain, saving)]
    assert kept[0] == kept[1]
    published = [Path(spec.output, "model.safetensors").read_bytes() for spec in (plain, saving)]
    assert published[0] == published[1]
