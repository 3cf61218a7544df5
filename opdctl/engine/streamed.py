"""A sum of losses that share an output matrix, with one gradient of it in memory instead of one a loss.

Shapes: N tokens, D width of the policy, V vocabulary.
"""

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from opdctl.engine.chunks import reusing_gradients

Term = tuple[slice, Callable[[Tensor, Tensor], Tensor]]  # tokens; their loss from (hidden, head)


def streamed(hidden_ND: Tensor, head_VD: Tensor, terms: Iterable[Term]) -> Tensor:
    """sum of term(hidden_ND[tokens], head_VD); the tokens of two terms do not overlap.

    Each term's gradients are taken before the next term is asked for and are added up, in at least float32. So memory
    does not grow with the number of terms, nor is anything alive that an earlier one read: a teacher's output matrix.
    """
    return cast(Tensor, _Streamed.apply(hidden_ND, head_VD, terms))  # type: ignore[no-untyped-call]  # torch's


class _Streamed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_ND: Tensor, head_VD: Tensor, terms: Iterable[Term]) -> Tensor:
        wide = torch.float64 if head_VD.dtype == torch.float64 else torch.float32
        grad_ND, sum_VD = torch.zeros_like(hidden_ND), torch.zeros_like(head_VD, dtype=wide)
        total = torch.zeros((), dtype=wide, device=head_VD.device)
        with reusing_gradients() as give_back:
            for tokens, term in terms:
                with torch.enable_grad():
                    part_ND, part_VD = hidden_ND[tokens].detach().requires_grad_(), head_VD.detach().requires_grad_()
                    loss = term(part_ND, part_VD)
                grad_ND[tokens], grad_VD = torch.autograd.grad(loss, (part_ND, part_VD))
                sum_VD += grad_VD
                total += loss.detach()
                del term, loss  # and all that they have read
                give_back(grad_VD)
        ctx.save_for_backward(grad_ND, sum_VD.to(head_VD.dtype))
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # backward() on the loss itself scales by 1, where a product would only cost another [V, D]
        grad_ND, grad_VD = (made if grad == 1 else made * grad for made in ctx.saved_tensors)
        return grad_ND, grad_VD, None
