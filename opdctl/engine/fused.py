"""Operations of a transformer layer with hand-written gradients: few passes over memory, little saved.

On small shapes these are what makes training faster than by composing library operations.

Legend: B rows, T columns, H query heads, K key heads, h size of a head.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

SMALL = 128  # columns up to which attention keeps its probabilities


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
        return rotate(unit * weight, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        unit, scale, weight, cos, sin = ctx.saved_tensors
        grad = rotate(grad, cos, -sin)
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


def norm_rotate(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    """See `_NormRotate`."""
    rotated: Tensor = _NormRotate.apply(x, weight, cos, sin, eps)  # type: ignore[no-untyped-call]  # torch leaves it unannotated
    return rotated


def swiglu(gate_up: Tensor) -> Tensor:
    """See `_SwiGlu`."""
    if not torch.is_grad_enabled():  # the same products, nothing kept for a backward pass
        gate, up = gate_up.chunk(2, -1)
        return gate.sigmoid().mul_(gate).mul_(up)
    gated: Tensor = _SwiGlu.apply(gate_up)  # type: ignore[no-untyped-call]  # torch leaves it unannotated
    return gated


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
    """[B, T, H h]; shapes as in `_SmallAttention`, `bias` None: causal."""
    columns = q.shape[2]
    if columns <= SMALL and q.device.type == "cpu" and q.dtype != torch.bfloat16:
        if bias is None:
            bias = torch.full((columns, columns), float("-inf"), dtype=q.dtype).triu_(1)
        attended: Tensor = _SmallAttention.apply(q, k, v, bias)  # type: ignore[no-untyped-call]  # torch leaves it unannotated
    else:
        shared = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
        attended = F.scaled_dot_product_attention(q, k, v, bias, is_causal=bias is None)
    return attended.transpose(1, 2).flatten(2)


def _unit_rms(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    wide = x if x.dtype == torch.float64 else x.float()
    # By the norm, not by a mean of squares: one pass, and no temporary as large as x.
    length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    scale = length.square_().mul_(1 / x.shape[-1]).add_(eps).rsqrt_()
    return (wide * scale).to(x.dtype), scale


def _unit_rms_backward(grad: Tensor, unit: Tensor, scale: Tensor) -> Tensor:
    """Gradient of x / rms(x). Overwrites `grad`."""
    along = (grad * unit).mean(-1, keepdim=True)
    return grad.addcmul_(unit, along, value=-1).mul_(scale.to(grad.dtype))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (x_i, x_{i + h/2}); the first half of `sin` holds -sin."""
    return (x * cos).addcmul_(x.roll(x.shape[-1] // 2, -1), sin)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    normed: Tensor = _RmsNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]  # torch leaves it unannotated
    return normed


def direction(x: Tensor, floor: Tensor) -> Tensor:
    """x / sqrt(sum x^2 + floor^2) over the last axis, without gradient: an RMS norm of eps = floor^2 / size, less the
    factor sqrt(size) and the weight, which a following matrix can hold."""
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=floor.dtype)
    turned: Tensor = (x / length.hypot(floor)).to(x.dtype)
    return turned
