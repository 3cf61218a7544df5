"""Tiny models for the engine's tests."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from opdctl.engine.checkpoint import new_policy
from opdctl.engine.policy import Policy
from opdctl.engine.tokenizer import Tokenizer, word_tokenizer
from opdctl.settings import NewModel

WORDS = ["<pad>", "<bos>", "<eos>", *(f"w{i}" for i in range(3, 29))]


def new_model(**shape) -> NewModel:
    given = {
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
        **shape,
    }
    return NewModel.model_validate({"source": "new", "shape": given, "tokenizer": {"words": WORDS}})


def tiny_policy(seed: int = 0, spread: float = 3.0, **shape) -> tuple[Policy, Tokenizer]:
    """A Qwen3 at random; `spread` enlarges the embeddings, so that distributions are far from uniform."""
    policy, tokenizer = new_policy(new_model(**shape), seed)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(seed + 1)
        for name, weight in policy.named_parameters():
            if weight.dim() == 1:
                weight.add_(0.3 * torch.randn(weight.shape, generator=generator))
            elif name.endswith(("embed_tokens.weight", "lm_head.weight")):
                weight.mul_(spread / 0.2)
    return policy, tokenizer


def save_hf(config: PreTrainedConfig, folder: Path, **options) -> AutoModelForCausalLM:
    """A random transformers model with a word tokenizer, as a folder."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn_like(weight) * 0.2)
    model.save_pretrained(folder, **options)
    word_tokenizer(WORDS).save_pretrained(folder)
    return model
