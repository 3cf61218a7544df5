"""Tiny GGUF files as llama.cpp would write them."""

from pathlib import Path

import gguf
import torch
from transformers import LlamaConfig, LlamaForCausalLM

LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"
WORDS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *LETTERS, "ab", "cd"]
SPECIAL = 3
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def tiny_llama() -> LlamaForCausalLM:
    """At random, its embeddings tied and rounded to 8 bits."""
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        rms_norm_eps=1e-5,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn_like(weight) * 0.2)
        embedding = model.get_input_embeddings().weight
        eight_bits = gguf.quants.quantize(embedding.numpy(), gguf.GGMLQuantizationType.Q8_0)
        embedding.copy_(torch.tensor(gguf.quants.dequantize(eight_bits, gguf.GGMLQuantizationType.Q8_0)))
    return model


def write_gguf(path: Path, model: LlamaForCausalLM, *, architecture: str = "llama") -> Path:
    """With the end of sequence as padding, as SmolLM2's file has it. The embeddings are written in 8 bits."""
    config, writer = model.config, gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    _add_tokenizer(writer)
    for name, weight in model.state_dict().items():
        _add_tensor(writer, config, name, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokenizer(writer: gguf.GGUFWriter) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(WORDS)
    writer.add_token_types([3] * SPECIAL + [1] * (len(WORDS) - SPECIAL))  # 3: control
    writer.add_token_merges(["a b", "c d"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)


def _add_tensor(writer: gguf.GGUFWriter, config: LlamaConfig, name: str, weight: torch.Tensor) -> None:
    if name == "lm_head.weight":  # tied
        return
    if name == "model.embed_tokens.weight":
        eight_bits = gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor("token_embd.weight", gguf.quants.quantize(weight.numpy(), eight_bits), raw_dtype=eight_bits)
        return
    if name == "model.norm.weight":
        writer.add_tensor("output_norm.weight", weight.numpy())
        return
    _, _, layer, rest = name.split(".", 3)
    part = rest.removesuffix(".weight")
    if part.endswith(("q_proj", "k_proj")):  # llama.cpp rotates neighbours, transformers halves
        heads = config.num_attention_heads if part.endswith("q_proj") else config.num_key_value_heads
        weight = weight.view(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape).contiguous()
    writer.add_tensor(f"blk.{layer}.{NAMES[part]}.weight", weight.numpy())
