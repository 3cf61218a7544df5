"""Operations of a transformer layer with hand-written gradients: few passes over memory, little saved.

On small shapes these are what makes training faster than by composing library operations.

Legend: B rows, T columns, H query heads, K key heads, h size of a head.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

SMALL = 128  # columns up to which attention keeps its probabilities
NARROW = 16  # columns below which PyTorch's softmax on a CPU takes one number at a time


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
    """RMS norm of every head, then the rotary embedding. x [B, T, H, h], weight [H, h], turn [B, T, 1, h/2]."""

    @staticmethod
    def forward(ctx: _Context, x: Tensor, weight: Tensor, turn: Tensor, eps: float) -> Tensor:
        unit, scale = _unit_rms(x, eps)
        ctx.save_for_backward(unit, scale, weight, turn)
        return rotate(unit * weight, turn)

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        unit, scale, weight, turn = ctx.saved_tensors
        grad = rotate(grad.clone(), turn.conj())
        grad_weight = (grad * unit).sum((0, 1))
        return _unit_rms_backward(grad.mul_(weight), unit, scale), grad_weight, None, None


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
        grad_gate_up = torch.empty_like(gate_up)
        grad_gate, grad_up = grad_gate_up.chunk(2, -1)
        torch.mul(grad, active, out=grad_up)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=grad_gate)
        return grad_gate_up


class _SmallAttention(torch.autograd.Function):
    """softmax(q k' + bias) v with the probabilities kept: for short rows much faster than the fused kernel.

    q [B, H, T, h]; k and v [B, K, T, h], each serving H/K queries; bias [B or 1, 1, T, T].
    """

    @staticmethod
    def forward(ctx: _Context, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        rows, heads, columns, size = q.shape
        q = q.reshape(-1, heads // k.shape[1] * columns, size)  # queries of a key head side by side
        k, v = k.reshape(-1, columns, size), v.reshape(-1, columns, size)
        scores = torch.bmm(q, k.transpose(1, 2)).view(rows, heads, columns, columns).add_(bias)
        probs = softmax(scores)[..., :columns].view(-1, q.shape[1], columns)
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
        grad_q = torch.bmm(grad_scores, k).view(rows, heads, columns, size)
        grad_k = torch.bmm(grad_scores.transpose(1, 2), q)
        return grad_q, grad_k.view(rows, -1, columns, size), grad_v.view(rows, -1, columns, size), None


def norm_rotate(x: Tensor, weight: Tensor, turn: Tensor, eps: float) -> Tensor:
    """See `_NormRotate`."""
    rotated: Tensor = _NormRotate.apply(x, weight, turn, eps)  # type: ignore[no-untyped-call]  # torch leaves it unannotated
    return rotated


def swiglu(gate_up: Tensor) -> Tensor:
    """See `_SwiGlu`."""
    if not torch.is_grad_enabled():  # the same products in place
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate, inplace=True).mul_(up)
    gated: Tensor = _SwiGlu.apply(gate_up)  # type: ignore[no-untyped-call]  # torch leaves it unannotated
    return gated


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
    """[B, T, H h]; shapes as in `_SmallAttention`, `bias` None: causal. The queries carry the factor 1 / sqrt(h)."""
    columns = q.shape[2]
    if columns <= SMALL and q.device.type == "cpu" and q.dtype != torch.bfloat16:
        if bias is None:
            bias = torch.full((columns, columns), float("-inf"), dtype=q.dtype).triu_(1)
        attended: Tensor = _SmallAttention.apply(q, k, v, bias)  # type: ignore[no-untyped-call]  # torch leaves it unannotated
    else:
        shared = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
        attended = F.scaled_dot_product_attention(q, k, v, bias, is_causal=bias is None, scale=1.0)
    return attended.transpose(1, 2).flatten(2)


def softmax(scores: Tensor) -> Tensor:
    """Over the last axis; of fewer than `NARROW` columns `NARROW` are made, zeros behind: seven times faster."""
    if scores.shape[-1] < NARROW:
        scores = F.pad(scores, (0, NARROW - scores.shape[-1]), value=float("-inf"))
    return scores.softmax(-1)


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


def rotate(x: Tensor, turn: Tensor) -> Tensor:
    """Multiply neighbours (x_2i, x_2i+1), read as one complex number, by `turn`, of absolute value 1. Overwrites x."""
    wide = x.float() if x.dtype == torch.bfloat16 else x
    torch.view_as_complex(wide.view(*x.shape[:-1], -1, 2)).mul_(turn)
    return wide if wide is x else wide.bfloat16()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    normed: Tensor = _RmsNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]  # torch leaves it unannotated
    return normed


def direction(x: Tensor, floor: Tensor) -> Tensor:
    """x / sqrt(sum x^2 + floor^2) over the last axis, without gradient: an RMS norm of eps = floor^2 / size, less the
    factor sqrt(size) and the weight, which a following matrix can hold."""
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=floor.dtype)
    turned: Tensor = x / length.hypot_(floor)
    return turned if turned.dtype == x.dtype else turned.to(x.dtype)
