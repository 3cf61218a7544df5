"""A Qwen3 network with a forward and backward pass written for small shapes, where overhead outweighs arithmetic.

Same parameters, names and results as `transformers.Qwen3ForCausalLM`. Faster because q, k and v (gate and up) are one
product, the rest of a layer has hand-written gradients, and the last layer ends only where a token is wanted.

Legend: B rows, T columns, P prompt columns, N wanted positions, D hidden size, H query heads, K key heads, h size of
a head, `room` columns of the cache.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedConfig, Qwen3Config

from opdctl.engine.batch import TokenBatch
from opdctl.engine.fused import NARROW, attend, direction, norm_rotate, rms_norm, rotate, swiglu
from opdctl.engine.policy import Cache, Policy


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
    qk_norm: Tensor  # [H + K, h]; attention's 1 / sqrt(h) is in the queries'
    gate_up: Tensor


class _Step(NamedTuple):
    """Weights of a layer as one decoding step uses them: norms folded into the matrices, for input times matrix."""

    qkv: Tensor  # [D, (H + 2 K) h]
    qk_norm: Tensor  # [H + K, h]
    output: Tensor  # [H h, D]
    gate_up: Tensor
    down: Tensor


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
        """What the rotary embedding turns together, i and i + h/2 in the parameters, stands side by side here."""
        a, half = self.self_attn, self.head_dim // 2
        qk_norm = torch.cat(
            [
                a.q_norm.weight.view(2, half).T.reshape(1, -1).expand(self.heads, -1) * self.head_dim**-0.5,
                a.k_norm.weight.view(2, half).T.reshape(1, -1).expand(self.key_heads, -1),
            ]
        )
        q, k = (
            projection.weight.view(-1, 2, half, projection.weight.shape[1]).transpose(1, 2).flatten(0, 2)
            for projection in (a.q_proj, a.k_proj)
        )
        qkv = torch.cat([q, k, a.v_proj.weight])
        return _Joined(qkv, qk_norm, torch.cat([self.mlp.gate_proj.weight, self.mlp.up_proj.weight]))

    def step(self, joined: _Joined) -> _Step:
        root = self.input_layernorm.weight.shape[0] ** 0.5  # `direction` leaves it to the matrix
        return _Step(
            (joined.qkv * (self.input_layernorm.weight * root)).T,
            joined.qk_norm * self.head_dim**0.5,
            self.self_attn.o_proj.weight.T,
            (joined.gate_up * (self.post_attention_layernorm.weight * root)).T,
            self.mlp.down_proj.weight.T,
        )

    def forward(self, x_BTD: Tensor, turn: Tensor, bias: Tensor | None, wanted_N: Tensor | None) -> Tensor:
        """[B, T, D], or [N, D] at the flat indices `wanted_N`."""
        joined = self.joined()
        attended = attend(*self.queries_keys_values(x_BTD, turn, joined), bias)
        if wanted_N is not None:
            attended, x_BTD = attended.flatten(0, 1)[wanted_N], x_BTD.flatten(0, 1)[wanted_N]
        return self.finish(x_BTD, attended, joined)

    def queries_keys_values(self, x_BTD: Tensor, turn: Tensor, joined: _Joined) -> tuple[Tensor, Tensor, Tensor]:
        """q [B, H, T, h], k and v [B, K, T, h], as the cache holds them."""
        rotated = self.heads + self.key_heads
        normed = rms_norm(x_BTD, self.input_layernorm.weight, self.eps)
        heads = F.linear(normed, joined.qkv).view(*x_BTD.shape[:2], -1, self.head_dim)
        qk = norm_rotate(heads[:, :, :rotated], joined.qk_norm, turn, self.eps)
        q, k, v = qk[:, :, : self.heads], qk[:, :, self.heads :], heads[:, :, rotated:]
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def finish(self, x: Tensor, attended: Tensor, joined: _Joined) -> Tensor:
        """What follows attention, for any leading shape: output projection, MLP, both residual."""
        x = x + F.linear(attended, self.self_attn.o_proj.weight)
        normed = rms_norm(x, self.post_attention_layernorm.weight, self.eps)
        return x + F.linear(swiglu(F.linear(normed, joined.gate_up)), self.mlp.down_proj.weight)


class _Body(nn.Module):
    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        self.embed_tokens = _Weight(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(_Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = _Weight(config.hidden_size)


class Qwen3Cache:
    """Keys and values in tensors of their final size, and the weights made ready once for all steps."""

    def __init__(self, room: int, positions_B: Tensor, steps: list[_Step], floors: tuple[Tensor, Tensor]) -> None:
        self.room, self.length = max(room, NARROW), 0
        self.positions_B = positions_B  # of the next token
        self.steps = steps
        self.floors = floors  # of `direction`: of hidden states, of a head
        self.keys: list[Tensor] = []  # [B, K, h, room] a layer
        self.values: list[Tensor] = []  # [B, K, room, h]
        self.bias: Tensor | None = None  # [B, K, room]: -inf at padding; None where no row has any

    def store(self, keys_BKTh: Tensor, values_BKTh: Tensor) -> None:
        """Take over the prompt's keys and values of the next layer."""
        rows, heads, self.length, size = keys_BKTh.shape
        self.keys.append(keys_BKTh.new_zeros(rows, heads, size, self.room))
        self.values.append(values_BKTh.new_zeros(rows, heads, self.room, size))
        self.keys[-1][..., : self.length] = keys_BKTh.transpose(2, 3)
        self.values[-1][:, :, : self.length] = values_BKTh

    def attend(self, layer: int, q_BHh: Tensor, k_BKh: Tensor, v_BKh: Tensor) -> Tensor:
        """Append one token's key and value; what its queries read from all tokens so far, [B K, H/K, h]."""
        keys, values, upto = self.keys[layer], self.values[layer], self.length + 1
        keys[..., self.length], values[:, :, self.length] = k_BKh, v_BKh
        size = values.shape[-1]
        q = q_BHh.reshape(keys.shape[0] * keys.shape[1], -1, size)
        wide = max(upto, NARROW)
        past = keys.view(-1, size, self.room)[..., :wide]
        if self.bias is None:
            scores = torch.bmm(q, past)
        else:
            scores = torch.baddbmm(self.bias.view(-1, 1, self.room)[..., :wide], q, past)
        if upto < wide:
            scores[..., upto:] = float("-inf")
        return torch.bmm(scores.softmax(-1), values.view(-1, self.room, size)[:, :wide])

    def advance(self) -> None:
        self.length += 1
        self.positions_B = self.positions_B + 1

    def keep(self, rows: Tensor) -> None:
        self.keys = [keys.index_select(0, rows) for keys in self.keys]
        self.values = [values.index_select(0, rows) for values in self.values]
        self.positions_B = self.positions_B.index_select(0, rows)
        self.bias = None if self.bias is None else self.bias.index_select(0, rows)


class Qwen3Policy(Policy):
    """See the module. Weights are not initialised here; `opdctl.engine.checkpoint` makes or loads them."""

    shares_prefixes = True
    config: Qwen3Config
    turns: Tensor  # [positions, h/2, 2]: cosine and sine

    def __init__(self, config: Qwen3Config, eos_ids: tuple[int, ...], pad_id: int) -> None:
        super().__init__(config, eos_ids, pad_id)
        self.model = _Body(config)
        if not config.tie_word_embeddings:
            self.lm_head = _Weight(config.vocab_size, config.hidden_size)
        self.layers = [layer for layer in self.model.layers if isinstance(layer, _Layer)]
        self.recomputes = False
        self.register_buffer("turns", rotary_table(config), persistent=False)

    def linear_layers(self) -> dict[str, Tensor]:
        matrices = {name: weight for name, weight in self.model.layers.named_parameters() if weight.dim() == 2}
        return {f"model.layers.{name.removesuffix('.weight')}": weight for name, weight in matrices.items()}

    def checkpoint_activations(self) -> None:
        self.recomputes = True

    def head(self) -> Tensor:
        return self.model.embed_tokens.weight if self.config.tie_word_embeddings else self.lm_head.weight

    def hidden(self, batch: TokenBatch) -> Tensor:
        self.check_length(int(batch.positions_BT.max()) + 1)
        bias = None if batch.mask_BTT is None else self._bias(batch.mask_BTT)
        wanted_N = batch.rows_N * batch.ids_BT.shape[1] + batch.cols_N
        return self._forward(batch.ids_BT, batch.positions_BT, bias, wanted_N)

    @torch.no_grad()
    def prefill(self, prompts_BP: Tensor, lengths_B: Tensor, max_new: int) -> tuple[Tensor, Cache]:
        rows, columns = prompts_BP.shape
        self.check_length(columns + max_new)
        steps = [layer.step(layer.joined()) for layer in self.layers]
        wide = torch.float64 if self.turns.dtype == torch.float64 else torch.float32
        hidden, head = (
            torch.tensor((size * self.config.rms_norm_eps) ** 0.5, dtype=wide, device=self.device)
            for size in (self.config.hidden_size, self.config.head_dim)
        )
        cache = Qwen3Cache(columns + max_new, lengths_B, steps, (hidden, head))
        steps_P = torch.arange(columns, device=self.device)
        offsets_B1 = (columns - lengths_B)[:, None]
        bias = None
        if bool((offsets_B1 > 0).any()):
            seen_BP = steps_P >= offsets_B1
            # The diagonal keeps padding from attending to nothing, which is not a number.
            causal_PP = torch.ones(columns, columns, dtype=torch.bool, device=self.device).tril()
            diagonal_PP = torch.eye(columns, dtype=torch.bool, device=self.device)
            bias = self._bias(((seen_BP[:, None] & causal_PP) | diagonal_PP)[:, None])
            room_BKr = F.pad(seen_BP, (0, cache.room - columns), value=True)[:, None].expand(
                -1, self.config.num_key_value_heads, -1
            )
            cache.bias = self._bias(room_BKr)
        positions_N = (steps_P - offsets_B1).clamp_min(0).flatten()
        last_B = torch.arange(1, rows + 1, device=self.device) * columns - 1

        def read(layer: int, *qkv_NHh: Tensor) -> Tensor:
            q, k, v = (heads.view(rows, columns, *heads.shape[1:]).transpose(1, 2) for heads in qkv_NHh)
            cache.store(k, v)
            return attend(q, k, v, bias)

        return self._infer(prompts_BP.flatten(), self._turn(positions_N), cache, read, last_B), cache

    @torch.no_grad()
    def decode(self, tokens_B: Tensor, cache: Cache) -> Tensor:
        assert isinstance(cache, Qwen3Cache)
        # Without padding all rows are at one position, and a view of the tables will do.
        at = cache.positions_B if cache.bias is not None else slice(cache.length, cache.length + 1)
        hidden_BD = self._infer(tokens_B, self._turn(at), cache, cache.attend)
        cache.advance()
        return hidden_BD

    def _forward(self, ids_BT: Tensor, positions_BT: Tensor, bias: Tensor | None, wanted_N: Tensor) -> Tensor:
        """Hidden states at the flat indices `wanted_N` of [B, T]; `bias` is added to attention scores, None: causal."""
        x = F.embedding(ids_BT, self.model.embed_tokens.weight)
        turn = self._turn(positions_BT)
        for layer in self.layers:
            only = wanted_N if layer is self.layers[-1] else None
            if self.recomputes and torch.is_grad_enabled():
                x = checkpoint(layer.forward, x, turn, bias, only, use_reentrant=False, preserve_rng_state=False)
            else:
                x = layer.forward(x, turn, bias, only)
        return rms_norm(x, self.model.norm.weight, self.config.rms_norm_eps)

    def _infer(
        self,
        ids_N: Tensor,
        turn: Tensor,
        cache: Qwen3Cache,
        attend: Callable[[int, Tensor, Tensor, Tensor], Tensor],
        wanted: Tensor | None = None,
    ) -> Tensor:
        """The same, without gradient and with fewer operations, of a flat list of tokens: [N, D], or `wanted` of them.

        `attend` is given the layer's number, q [N, H, h], k and v [N, K, h].
        """
        steps, (floor, head_floor) = cache.steps, cache.floors
        heads, rotated, size = self.layers[0].heads, len(steps[0].qk_norm), self.layers[0].head_dim
        x = F.embedding(ids_N, self.model.embed_tokens.weight)
        for i, step in enumerate(steps):
            qkv = torch.mm(direction(x, floor), step.qkv).view(len(x), -1, size)
            qk = rotate(direction(qkv[:, :rotated], head_floor).mul_(step.qk_norm), turn)
            attended = attend(i, qk[:, :heads], qk[:, heads:], qkv[:, rotated:]).view(len(x), -1)
            if wanted is not None and i + 1 == len(steps):
                attended, x = attended[wanted], x[wanted]
            x.addmm_(attended, step.output)
            gate, up = torch.mm(direction(x, floor), step.gate_up).chunk(2, -1)
            x.addmm_(F.silu(gate, inplace=True).mul_(up), step.down)
        return rms_norm(x, self.model.norm.weight, self.layers[0].eps)

    def _turn(self, positions: Tensor | slice) -> Tensor:
        """Of the rotary embedding at these positions, as complex numbers: [..., 1, h/2]."""
        turns = self.turns[positions]
        return torch.view_as_complex(turns if turns.dtype == torch.float64 else turns.float())[..., None, :]

    def _bias(self, mask: Tensor) -> Tensor:
        """0 where `mask` is true, -inf elsewhere, in the dtype of the weights."""
        return torch.zeros_like(mask, dtype=self.head().dtype).masked_fill_(~mask, float("-inf"))


def rotary_table(config: Qwen3Config) -> Tensor:
    """Cosine and sine of every position and frequency: [positions, h/2, 2]."""
    half = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    angles = torch.outer(torch.arange(config.max_position_embeddings).float(), 1.0 / rope_theta(config) ** half)
    return torch.stack([angles.cos(), angles.sin()], -1)


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
