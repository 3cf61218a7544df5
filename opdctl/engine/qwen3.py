"""A Qwen3 network with a forward and backward pass written for small shapes, where overhead outweighs arithmetic.

Same parameters, names and results as `transformers.Qwen3ForCausalLM`. Faster because q, k and v (gate and up) are one
product, norms, rotation and SwiGLU have hand-written gradients, and the last layer ends only where a token is wanted.

Legend: B rows, T columns, N wanted positions, D hidden size, H query heads, K key heads, h size of a head.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable
from transformers import PreTrainedConfig, Qwen3Config

from opdctl.engine.batch import TokenBatch
from opdctl.engine.policy import Cache, Policy


class _Context(FunctionCtx):
    saved_tensors: tuple[Tensor, ...]


class _RmsNorm(torch.autograd.Function):
    """y = w x / rms(x) over the last axis; the statistics in float32."""

    @staticmethod
    def forward(ctx: _Context, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        unit, scale = _unit_rms(x, eps)
        ctx.save_for_backward(unit, scale, weight)
        return unit * weight

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        unit, scale, weight = ctx.saved_tensors
        grad_weight = (grad * unit).flatten(0, -2).sum(0)
        return _unit_rms_backward(grad * weight, unit, scale), grad_weight, None


class _NormRotate(torch.autograd.Function):
    """RMS norm of every head, then the rotary embedding. x [B, T, H, h], weight [H, h], cos and sin [B, T, 1, h/2]."""

    @staticmethod
    def forward(ctx: _Context, x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
        unit, scale = _unit_rms(x, eps)
        ctx.save_for_backward(unit, scale, weight, cos, sin)
        return _rotate(unit * weight, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        unit, scale, weight, cos, sin = ctx.saved_tensors
        grad = _rotate(grad, cos, -sin)
        grad_weight = (grad * unit).sum((0, 1))
        return _unit_rms_backward(grad.mul_(weight), unit, scale), grad_weight, None, None, None


class _SwiGlu(torch.autograd.Function):
    """silu(gate) * up, from [gate, up] side by side."""

    @staticmethod
    def forward(ctx: _Context, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        active = F.silu(gate)
        ctx.save_for_backward(gate_up, active)
        return active * up

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, grad: Tensor) -> Tensor:
        gate_up, active = ctx.saved_tensors
        gate, up = gate_up.chunk(2, -1)
        out = torch.empty_like(gate_up)
        grad_gate, grad_up = out.chunk(2, -1)
        torch.mul(grad, active, out=grad_up)
        grad_gate.copy_(torch.ops.aten.silu_backward(grad * up, gate))
        return out


def _unit_rms(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    wide = x if x.dtype == torch.float64 else x.float()
    scale = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    return (wide * scale).to(x.dtype), scale


def _unit_rms_backward(grad: Tensor, unit: Tensor, scale: Tensor) -> Tensor:
    """Gradient of x / rms(x). Overwrites `grad`."""
    along = (grad * unit).mean(-1, keepdim=True)
    return grad.addcmul_(unit, along, value=-1).mul_(scale.to(grad.dtype))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (x_i, x_{i + h/2})."""
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    out = torch.empty_like(x)
    torch.mul(first, cos, out=out[..., :half]).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=out[..., half:]).addcmul_(first, sin)
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    normed: Tensor = _RmsNorm.apply(x, weight, eps)
    return normed


def _scaled_rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rms_norm` without the bookkeeping of a gradient."""
    return _unit_rms(x, eps)[0] * weight


class _Weight(nn.Module):
    """A parameter called `weight`, not initialised."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape))


class _Attention(nn.Module):
    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        hidden, size = config.hidden_size, config.head_dim
        self.q_proj = _Weight(config.num_attention_heads * size, hidden)
        self.k_proj = _Weight(config.num_key_value_heads * size, hidden)
        self.v_proj = _Weight(config.num_key_value_heads * size, hidden)
        self.o_proj = _Weight(hidden, config.num_attention_heads * size)
        self.q_norm = _Weight(size)
        self.k_norm = _Weight(size)


class _Mlp(nn.Module):
    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        self.gate_proj = _Weight(config.intermediate_size, config.hidden_size)
        self.up_proj = _Weight(config.intermediate_size, config.hidden_size)
        self.down_proj = _Weight(config.hidden_size, config.intermediate_size)


class _Layer(nn.Module):
    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        self.self_attn = _Attention(config)
        self.mlp = _Mlp(config)
        self.input_layernorm = _Weight(config.hidden_size)
        self.post_attention_layernorm = _Weight(config.hidden_size)
        self.heads, self.key_heads, self.head_dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        self.eps = config.rms_norm_eps

    def fused(self) -> tuple[Tensor, Tensor, Tensor]:
        """Matrix of q, k and v; norm weights of the q and k heads; matrix of gate and up."""
        a = self.self_attn
        qk_norm = torch.cat(
            [
                a.q_norm.weight.expand(self.heads, -1),
                a.k_norm.weight.expand(self.key_heads, -1),
            ]
        )
        qkv = torch.cat([a.q_proj.weight, a.k_proj.weight, a.v_proj.weight])
        return qkv, qk_norm, torch.cat([self.mlp.gate_proj.weight, self.mlp.up_proj.weight])

    def queries_keys_values(
        self, x_BTD: Tensor, cos: Tensor, sin: Tensor, qkv: Tensor, qk_norm: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q [B, H, T, h], k and v [B, K, T, h], as the cache holds them."""
        rotated = self.heads + self.key_heads
        normed = _RmsNorm.apply(x_BTD, self.input_layernorm.weight, self.eps)
        heads = F.linear(normed, qkv).unflatten(-1, (rotated + self.key_heads, self.head_dim))
        qk = _NormRotate.apply(heads[..., :rotated, :], qk_norm, cos, sin, self.eps).transpose(-2, -3)
        return qk[..., : self.heads, :, :], qk[..., self.heads :, :, :], heads[..., rotated:, :].transpose(-2, -3)

    def finish(self, x: Tensor, attended: Tensor, gate_up: Tensor) -> Tensor:
        """What follows attention, for any leading shape: output projection, MLP, both residual."""
        x = x + F.linear(attended, self.self_attn.o_proj.weight)
        normed = _RmsNorm.apply(x, self.post_attention_layernorm.weight, self.eps)
        return x + F.linear(_SwiGlu.apply(F.linear(normed, gate_up)), self.mlp.down_proj.weight)


class _Body(nn.Module):
    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        self.embed_tokens = _Weight(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(_Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = _Weight(config.hidden_size)


class Qwen3Cache:
    """Keys and values in tensors of their final size, and the weights joined once for all steps."""

    def __init__(self, room: int, positions_B: Tensor, fused: list[tuple[Tensor, Tensor, Tensor]]) -> None:
        self.room, self.length = room, 0
        self.positions_B = positions_B  # of the next token
        self.fused = fused
        self.keys: list[Tensor] = []  # [B, K, room, h] a layer
        self.values: list[Tensor] = []
        self.bias: Tensor | None = None  # [B, 1, 1, room]: -inf at padding; None where no row has any

    def store(self, keys_BKTh: Tensor, values_BKTh: Tensor) -> None:
        """Take over the prompt's keys and values of the next layer."""
        rows, heads, self.length, size = keys_BKTh.shape
        for given, kept in ((keys_BKTh, self.keys), (values_BKTh, self.values)):
            kept.append(given.new_zeros(rows, heads, self.room, size))
            kept[-1][:, :, : self.length] = given

    def repeat(self, group_size: int) -> None:
        self._map(lambda tensor: tensor.repeat_interleave(group_size, 0))

    def keep(self, rows: Tensor) -> None:
        self._map(lambda tensor: tensor.index_select(0, rows))

    def _map(self, change: Callable[[Tensor], Tensor]) -> None:
        self.keys = [change(keys) for keys in self.keys]
        self.values = [change(values) for values in self.values]
        self.positions_B = change(self.positions_B)
        self.bias = None if self.bias is None else change(self.bias)


class Qwen3Policy(Policy):
    """See the module. Weights are not initialised here; `opdctl.engine.checkpoint` makes or loads them."""

    shares_prefixes = True
    config: Qwen3Config

    def __init__(self, config: Qwen3Config, eos_ids: tuple[int, ...], pad_id: int) -> None:
        super().__init__(config, eos_ids, pad_id)
        self.model = _Body(config)
        if not config.tie_word_embeddings:
            self.lm_head = _Weight(config.vocab_size, config.hidden_size)
        self.layers = [layer for layer in self.model.layers if isinstance(layer, _Layer)]
        half = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        angles = torch.outer(torch.arange(config.max_position_embeddings).float(), 1.0 / rope_theta(config) ** half)
        self.register_buffer("cos", angles.cos(), persistent=False)  # [positions, h/2]
        self.register_buffer("sin", angles.sin(), persistent=False)

    def head(self) -> Tensor:
        return self.model.embed_tokens.weight if self.config.tie_word_embeddings else self.lm_head.weight

    def hidden(self, batch: TokenBatch) -> Tensor:
        self.check_length(int(batch.positions_BT.max()) + 1)
        bias = None if batch.mask_BTT is None else self._bias(batch.mask_BTT)
        wanted_N = batch.rows_N * batch.ids_BT.shape[1] + batch.cols_N
        fused = [layer.fused() for layer in self.layers]
        return self._forward(batch.ids_BT, batch.positions_BT, bias, wanted_N, fused)

    @torch.no_grad()
    def prefill(self, prompts_BP: Tensor, lengths_B: Tensor, max_new: int) -> tuple[Tensor, Cache]:
        rows, columns = prompts_BP.shape
        self.check_length(columns + max_new)
        cache = Qwen3Cache(columns + max_new, lengths_B, [layer.fused() for layer in self.layers])
        steps_P = torch.arange(columns, device=self.device)
        offsets_B1 = (columns - lengths_B)[:, None]
        bias = None
        if bool((offsets_B1 > 0).any()):
            seen_BP = steps_P >= offsets_B1
            # The diagonal keeps padding from attending to nothing, which is not a number.
            causal_PP = torch.ones(columns, columns, dtype=torch.bool, device=self.device).tril()
            diagonal_PP = torch.eye(columns, dtype=torch.bool, device=self.device)
            bias = self._bias(((seen_BP[:, None] & causal_PP) | diagonal_PP)[:, None])
            cache.bias = self._bias(F.pad(seen_BP, (0, max_new), value=True)[:, None, None])
        positions_BP = (steps_P - offsets_B1).clamp_min(0)
        last_B = torch.arange(1, rows + 1, device=self.device) * columns - 1
        return self._forward(prompts_BP, positions_BP, bias, last_B, cache.fused, cache), cache

    def _forward(
        self,
        ids_BT: Tensor,
        positions_BT: Tensor,
        bias: Tensor | None,
        wanted_N: Tensor,
        fused: list[tuple[Tensor, Tensor, Tensor]],
        cache: Qwen3Cache | None = None,
    ) -> Tensor:
        """Hidden states at the flat indices `wanted_N` of [B, T]; `bias` is added to attention scores, None: causal."""
        x = F.embedding(ids_BT, self.model.embed_tokens.weight)
        cos, sin = self.cos[positions_BT][..., None, :], self.sin[positions_BT][..., None, :]
        for layer, (qkv, qk_norm, gate_up) in zip(self.layers, fused, strict=True):
            q, k, v = layer.queries_keys_values(x, cos, sin, qkv, qk_norm)
            if cache is not None:
                cache.store(k, v)
            shared = layer.heads // layer.key_heads
            attended = F.scaled_dot_product_attention(
                q, k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1), bias, is_causal=bias is None
            )
            attended = attended.transpose(1, 2).flatten(2)
            if layer is self.layers[-1]:
                attended, x = attended.flatten(0, 1)[wanted_N], x.flatten(0, 1)[wanted_N]
            x = layer.finish(x, attended, gate_up)
        return rms_norm(x, self.model.norm.weight, self.config.rms_norm_eps)

    @torch.no_grad()
    def decode(self, tokens_B: Tensor, cache: Cache) -> Tensor:
        assert isinstance(cache, Qwen3Cache)
        eps, at = self.config.rms_norm_eps, cache.length
        x_BD = F.embedding(tokens_B, self.model.embed_tokens.weight)
        cos, sin = self.cos[cache.positions_B][:, None], self.sin[cache.positions_B][:, None]
        bias = None if cache.bias is None else cache.bias[..., : at + 1]
        for i, (layer, (qkv, qk_norm, gate_up)) in enumerate(zip(self.layers, cache.fused, strict=True)):
            heads = F.linear(_scaled_rms(x_BD, layer.input_layernorm.weight, eps), qkv)
            heads = heads.unflatten(-1, (-1, layer.head_dim))
            rotated = layer.heads + layer.key_heads
            qk = _rotate(_scaled_rms(heads[:, :rotated], qk_norm, eps), cos, sin)
            cache.keys[i][:, :, at] = qk[:, layer.heads :]
            cache.values[i][:, :, at] = heads[:, rotated:]
            q = qk[:, : layer.heads].unflatten(1, (layer.key_heads, -1)) * layer.head_dim**-0.5
            scores = q @ cache.keys[i][:, :, : at + 1].transpose(-1, -2)
            if bias is not None:
                scores = scores + bias
            attended = scores.softmax(-1) @ cache.values[i][:, :, : at + 1]
            x_BD = x_BD + F.linear(attended.flatten(1), layer.self_attn.o_proj.weight)
            gate, up = F.linear(_scaled_rms(x_BD, layer.post_attention_layernorm.weight, eps), gate_up).chunk(2, -1)
            x_BD = x_BD + F.linear(F.silu(gate).mul_(up), layer.mlp.down_proj.weight)
        cache.length += 1
        cache.positions_B = cache.positions_B + 1
        return _scaled_rms(x_BD, self.model.norm.weight, eps)

    def _bias(self, mask: Tensor) -> Tensor:
        """0 where `mask` is true, -inf elsewhere, in the dtype of the weights."""
        return torch.zeros_like(mask, dtype=self.head().dtype).masked_fill_(~mask, float("-inf"))


def rope_theta(config: Qwen3Config) -> float:
    return float(config.rope_parameters["rope_theta"])


def exact_for(config: PreTrainedConfig) -> bool:
    """Whether Qwen3Policy computes what transformers would for this configuration."""
    return (
        isinstance(config, Qwen3Config)
        and config.hidden_act == "silu"
        and not config.attention_bias
        and config.rope_parameters["rope_type"] == "default"
        and all(kind == "full_attention" for kind in config.layer_types)
        and config.head_dim % 2 == 0
        and getattr(config, "quantization_config", None) is None
    )
