"""A Qwen3 network with a forward and backward pass written for small shapes, where overhead outweighs arithmetic.

Same parameters, names and results as `transformers.Qwen3ForCausalLM`. Faster because q, k and v (gate and up) are one
product, norms, rotation and SwiGLU have hand-written gradients, and the last layer ends only where a token is wanted.

Legend: B rows, T columns, N wanted positions, D hidden size, H query heads, K key heads, h size of a head.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable
from transformers import PreTrainedConfig, Qwen3Config

from opdctl.engine.batch import TokenBatch
from opdctl.engine.policy import Cache, Policy


_SMALL = 128  # columns up to which attention keeps its probabilities


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
    """RMS norm of every head, then the rotary embedding. x [B, T, H, h], weight [H, h], cos and sin [B, T, 1, h]."""

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
        opened = gate.sigmoid()
        active = gate * opened
        ctx.save_for_backward(up, opened, active)
        return active * up

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, grad: Tensor) -> Tensor:
        up, opened, active = ctx.saved_tensors
        grad_gate_up = torch.empty(*grad.shape[:-1], 2 * grad.shape[-1], dtype=grad.dtype, device=grad.device)
        grad_gate, grad_up = grad_gate_up.chunk(2, -1)
        torch.mul(grad, active, out=grad_up)
        slope = (1 - opened).mul_(active).add_(opened)  # of silu, without a second exponential
        torch.mul(grad, up, out=grad_gate).mul_(slope)
        return grad_gate_up


class _SmallAttention(torch.autograd.Function):
    """softmax(q k' / sqrt(h) + bias) v with the probabilities kept: for short rows much faster than the fused kernel.

    q [B, H, T, h]; k and v [B, K, T, h], each serving H/K queries; bias [B or 1, 1, T, T].
    """

    @staticmethod
    def forward(ctx: _Context, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        rows, heads, columns, size = q.shape
        q = (q * size**-0.5).reshape(-1, heads // k.shape[1] * columns, size)  # queries of a key head side by side
        k, v = k.reshape(-1, columns, size), v.reshape(-1, columns, size)
        scores = torch.bmm(q, k.transpose(1, 2)).view(rows, heads, columns, columns).add_(bias)
        probs = scores.softmax(-1).view(-1, q.shape[1], columns)
        ctx.save_for_backward(q, k, v, probs)
        return torch.bmm(probs, v).view(rows, heads, columns, size)

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, probs = ctx.saved_tensors
        rows, heads, columns, size = grad.shape
        grad = grad.reshape(q.shape)
        grad_v = torch.bmm(probs.transpose(1, 2), grad)
        grad_probs = torch.bmm(grad, v.transpose(1, 2))
        grad_scores = torch.ops.aten._softmax_backward_data(grad_probs, probs, -1, probs.dtype)
        grad_q = torch.bmm(grad_scores, k).mul_(size**-0.5).view(rows, heads, columns, size)
        grad_k = torch.bmm(grad_scores.transpose(1, 2), q)
        return grad_q, grad_k.view(rows, -1, columns, size), grad_v.view(rows, -1, columns, size), None


def _attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
    """[B, T, H h]; shapes as in `_SmallAttention`, `bias` None: causal."""
    columns = q.shape[2]
    if columns <= _SMALL and q.device.type == "cpu" and q.dtype != torch.bfloat16:
        if bias is None:
            bias = torch.full((columns, columns), float("-inf"), dtype=q.dtype).triu_(1)
        attended: Tensor = _SmallAttention.apply(q, k, v, bias)  # type: ignore[no-untyped-call]
    else:
        shared = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
        attended = F.scaled_dot_product_attention(q, k, v, bias, is_causal=bias is None)
    return attended.transpose(1, 2).flatten(2)


def _unit_rms(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    wide = x if x.dtype == torch.float64 else x.float()
    scale = wide.square().sum(-1, keepdim=True).mul_(1 / x.shape[-1]).add_(eps).rsqrt_()
    return (wide * scale).to(x.dtype), scale


def _unit_rms_backward(grad: Tensor, unit: Tensor, scale: Tensor) -> Tensor:
    """Gradient of x / rms(x). Overwrites `grad`."""
    along = (grad * unit).mean(-1, keepdim=True)
    return grad.addcmul_(unit, along, value=-1).mul_(scale.to(grad.dtype))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (x_i, x_{i + h/2}); the first half of `sin` holds -sin."""
    return (x * cos).addcmul_(x.roll(x.shape[-1] // 2, -1), sin)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    normed: Tensor = _RmsNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]
    return normed


def _scaled_rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rms_norm` without the bookkeeping of a gradient."""
    return _unit_rms(x, eps)[0].mul_(weight)


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


class _Joined(NamedTuple):
    """Weights of a layer that are used together."""

    qkv: Tensor
    qk_norm: Tensor  # [H + K, h]
    gate_up: Tensor


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

    def joined(self) -> _Joined:
        a = self.self_attn
        qk_norm = torch.cat(
            [
                a.q_norm.weight.expand(self.heads, -1),
                a.k_norm.weight.expand(self.key_heads, -1),
            ]
        )
        qkv = torch.cat([a.q_proj.weight, a.k_proj.weight, a.v_proj.weight])
        return _Joined(qkv, qk_norm, torch.cat([self.mlp.gate_proj.weight, self.mlp.up_proj.weight]))

    def queries_keys_values(
        self, x_BTD: Tensor, cos: Tensor, sin: Tensor, joined: _Joined
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q [B, H, T, h], k and v [B, K, T, h], as the cache holds them."""
        rotated = self.heads + self.key_heads
        normed = rms_norm(x_BTD, self.input_layernorm.weight, self.eps)
        heads = F.linear(normed, joined.qkv).view(*x_BTD.shape[:2], -1, self.head_dim)
        qk: Tensor = _NormRotate.apply(  # type: ignore[no-untyped-call]
            heads[:, :, :rotated], joined.qk_norm, cos, sin, self.eps
        )
        q, k, v = qk[:, :, : self.heads], qk[:, :, self.heads :], heads[:, :, rotated:]
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def finish(self, x: Tensor, attended: Tensor, joined: _Joined) -> Tensor:
        """What follows attention, for any leading shape: output projection, MLP, both residual."""
        x = x + F.linear(attended, self.self_attn.o_proj.weight)
        normed = rms_norm(x, self.post_attention_layernorm.weight, self.eps)
        active: Tensor = _SwiGlu.apply(F.linear(normed, joined.gate_up))  # type: ignore[no-untyped-call]
        return x + F.linear(active, self.mlp.down_proj.weight)


class _Body(nn.Module):
    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        self.embed_tokens = _Weight(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(_Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = _Weight(config.hidden_size)


class Qwen3Cache:
    """Keys and values in tensors of their final size, and the weights joined once for all steps."""

    def __init__(self, room: int, positions_B: Tensor, joined: list[_Joined]) -> None:
        self.room, self.length = room, 0
        self.positions_B = positions_B  # of the next token
        self.joined = joined
        self.keys: list[Tensor] = []  # [B, K, room, h] a layer
        self.values: list[Tensor] = []
        self.bias: Tensor | None = None  # [B, K, room]: -inf at padding; None where no row has any

    def store(self, keys_BKTh: Tensor, values_BKTh: Tensor) -> None:
        """Take over the prompt's keys and values of the next layer."""
        rows, heads, self.length, size = keys_BKTh.shape
        for given, kept in ((keys_BKTh, self.keys), (values_BKTh, self.values)):
            kept.append(given.new_zeros(rows, heads, self.room, size))
            kept[-1][:, :, : self.length] = given

    def attend(self, layer: int, q_BHh: Tensor, k_BKh: Tensor, v_BKh: Tensor) -> Tensor:
        """Append one token's key and value; what its queries read from all tokens so far, [B K, H/K, h]."""
        keys, values, upto = self.keys[layer], self.values[layer], self.length + 1
        keys[:, :, self.length], values[:, :, self.length] = k_BKh, v_BKh
        size = keys.shape[-1]
        q = q_BHh.reshape(keys.shape[0] * keys.shape[1], -1, size)
        past = keys.view(-1, self.room, size)[:, :upto].transpose(1, 2)
        if self.bias is None:
            scores = torch.baddbmm(q.new_empty(1), q, past, beta=0, alpha=size**-0.5)
        else:
            scores = torch.baddbmm(self.bias.view(-1, 1, self.room)[..., :upto], q, past, alpha=size**-0.5)
        return torch.bmm(scores.softmax(-1), values.view(-1, self.room, size)[:, :upto])

    def advance(self) -> None:
        self.length += 1
        self.positions_B = self.positions_B + 1

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
    cos: Tensor  # [positions, h]
    sin: Tensor  # the same, negative in the first half

    def __init__(self, config: Qwen3Config, eos_ids: tuple[int, ...], pad_id: int) -> None:
        super().__init__(config, eos_ids, pad_id)
        self.model = _Body(config)
        if not config.tie_word_embeddings:
            self.lm_head = _Weight(config.vocab_size, config.hidden_size)
        self.layers = [layer for layer in self.model.layers if isinstance(layer, _Layer)]
        half = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        angles = torch.outer(torch.arange(config.max_position_embeddings).float(), 1.0 / rope_theta(config) ** half)
        self.register_buffer("cos", angles.cos().repeat(1, 2), persistent=False)
        self.register_buffer("sin", torch.cat([-angles.sin(), angles.sin()], 1), persistent=False)

    def head(self) -> Tensor:
        return self.model.embed_tokens.weight if self.config.tie_word_embeddings else self.lm_head.weight

    def hidden(self, batch: TokenBatch) -> Tensor:
        self.check_length(int(batch.positions_BT.max()) + 1)
        bias = None if batch.mask_BTT is None else self._bias(batch.mask_BTT)
        wanted_N = batch.rows_N * batch.ids_BT.shape[1] + batch.cols_N
        joined = [layer.joined() for layer in self.layers]
        return self._forward(batch.ids_BT, batch.positions_BT, bias, wanted_N, joined)

    @torch.no_grad()
    def prefill(self, prompts_BP: Tensor, lengths_B: Tensor, max_new: int) -> tuple[Tensor, Cache]:
        rows, columns = prompts_BP.shape
        self.check_length(columns + max_new)
        cache = Qwen3Cache(columns + max_new, lengths_B, [layer.joined() for layer in self.layers])
        steps_P = torch.arange(columns, device=self.device)
        offsets_B1 = (columns - lengths_B)[:, None]
        bias = None
        if bool((offsets_B1 > 0).any()):
            seen_BP = steps_P >= offsets_B1
            # The diagonal keeps padding from attending to nothing, which is not a number.
            causal_PP = torch.ones(columns, columns, dtype=torch.bool, device=self.device).tril()
            diagonal_PP = torch.eye(columns, dtype=torch.bool, device=self.device)
            bias = self._bias(((seen_BP[:, None] & causal_PP) | diagonal_PP)[:, None])
            room_BKr = F.pad(seen_BP, (0, max_new), value=True)[:, None].expand(-1, self.config.num_key_value_heads, -1)
            cache.bias = self._bias(room_BKr)
        positions_BP = (steps_P - offsets_B1).clamp_min(0)
        last_B = torch.arange(1, rows + 1, device=self.device) * columns - 1
        return self._forward(prompts_BP, positions_BP, bias, last_B, cache.joined, cache), cache

    def _forward(
        self,
        ids_BT: Tensor,
        positions_BT: Tensor,
        bias: Tensor | None,
        wanted_N: Tensor,
        weights: list[_Joined],
        cache: Qwen3Cache | None = None,
    ) -> Tensor:
        """Hidden states at the flat indices `wanted_N` of [B, T]; `bias` is added to attention scores, None: causal."""
        x = F.embedding(ids_BT, self.model.embed_tokens.weight)
        cos, sin = self.cos[positions_BT][..., None, :], self.sin[positions_BT][..., None, :]
        for layer, joined in zip(self.layers, weights, strict=True):
            q, k, v = layer.queries_keys_values(x, cos, sin, joined)
            if cache is not None:
                cache.store(k, v)
            attended = _attend(q, k, v, bias)
            if layer is self.layers[-1]:
                attended, x = attended.flatten(0, 1)[wanted_N], x.flatten(0, 1)[wanted_N]
            x = layer.finish(x, attended, joined)
        return rms_norm(x, self.model.norm.weight, self.config.rms_norm_eps)

    @torch.no_grad()
    def decode(self, tokens_B: Tensor, cache: Cache) -> Tensor:
        assert isinstance(cache, Qwen3Cache)
        eps, rows = self.config.rms_norm_eps, len(tokens_B)
        x_BD = F.embedding(tokens_B, self.model.embed_tokens.weight)
        cos, sin = self.cos[cache.positions_B][:, None], self.sin[cache.positions_B][:, None]
        for i, (layer, joined) in enumerate(zip(self.layers, cache.joined, strict=True)):
            heads = F.linear(_scaled_rms(x_BD, layer.input_layernorm.weight, eps), joined.qkv)
            heads = heads.view(rows, -1, layer.head_dim)
            rotated = layer.heads + layer.key_heads
            qk = _rotate(_scaled_rms(heads[:, :rotated], joined.qk_norm, eps), cos, sin)
            attended = cache.attend(i, qk[:, : layer.heads], qk[:, layer.heads :], heads[:, rotated:])
            x_BD = x_BD + F.linear(attended.view(rows, -1), layer.self_attn.o_proj.weight)
            gate_up = F.linear(_scaled_rms(x_BD, layer.post_attention_layernorm.weight, eps), joined.gate_up)
            gate, up = gate_up.chunk(2, -1)
            x_BD = x_BD + F.linear(F.silu(gate).mul_(up), layer.mlp.down_proj.weight)
        cache.advance()
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
