"""A streamed sum is the sum; its terms come and go one by one."""

import weakref
from functools import partial

import pytest
import torch

from opdctl.engine.streamed import streamed
from opdctl.engine.vocab import full_vocab_reverse_kl, token_logprobs


def inputs(tokens: int = 12, vocab: int = 7, width: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden, head = (torch.randn(rows, width, generator=generator, dtype=torch.float64) for rows in (tokens, vocab))
    return hidden.requires_grad_(), head.requires_grad_()


SLICES = [slice(0, 3), slice(3, 4), slice(4, 4), slice(4, 12)]


def kl(hidden, head):
    teacher_hidden, teacher_head = inputs(tokens=len(hidden))
    return full_vocab_reverse_kl(hidden, head, teacher_hidden.detach().roll(1, -1), teacher_head.detach().flip(0))[0]


def surprise(hidden, head):
    return -token_logprobs(hidden, head, torch.full((len(hidden),), 3))[0].sum() * 2.0


@pytest.mark.parametrize("term", [kl, surprise])
def test_value_and_gradients_are_those_of_the_plain_sum(term):
    hidden, head = inputs()
    plain = torch.stack([term(hidden[tokens], head) for tokens in SLICES]).sum()
    wanted = torch.autograd.grad(3.0 * plain, (hidden, head))
    loss = streamed(hidden, head, ((tokens, term) for tokens in SLICES))
    found = torch.autograd.grad(3.0 * loss, (hidden, head))
    torch.testing.assert_close(loss, plain)
    torch.testing.assert_close(found, wanted)


def test_gradients_are_right():
    hidden, head = inputs(tokens=4)
    assert torch.autograd.gradcheck(
        lambda h, w: streamed(h, w, [(slice(0, 3), kl), (slice(3, 4), surprise)]), (hidden, head)
    )


def test_a_term_is_gone_before_the_next_is_made():
    hidden, head = inputs()
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    most = 0

    def term(teacher_head, h, w):
        return full_vocab_reverse_kl(h, w, h.detach(), teacher_head)[0]

    def made():
        teacher_head = torch.randn(7, 5, dtype=torch.float64)
        alive.add(teacher_head)
        return partial(term, teacher_head)

    def terms():
        nonlocal most
        for tokens in SLICES:
            yield tokens, made()
            most = max(most, len(alive))

    streamed(hidden, head, terms()).backward()
    assert most == 0


def test_bfloat16_gradients_of_many_terms_are_summed_in_float32():
    hidden = torch.zeros(512, 1, dtype=torch.bfloat16).requires_grad_()
    head = torch.zeros(1, 1, dtype=torch.bfloat16).requires_grad_()
    streamed(hidden, head, ((slice(i, i + 1), lambda h, w: h.sum() + w.sum()) for i in range(512))).backward()
    assert head.grad.item() == 512.0  # in bfloat16, 256 + 1 is 256


def test_gradients_that_are_written_over_were_added_before():
    """Several chunks a term, and scaled losses: what comes back is no buffer of the next one."""
    hidden, head = inputs(tokens=40)
    slices = [slice(at, at + 10) for at in range(0, 40, 10)]

    def weighted(h, w):
        return 0.5 * full_vocab_reverse_kl(h, w, h.detach().flip(-1), w.detach().flip(0), chunk=3)[0]

    wanted = torch.autograd.grad(sum(weighted(hidden[tokens], head) for tokens in slices), (hidden, head))
    found = torch.autograd.grad(streamed(hidden, head, ((s, weighted) for s in slices)), (hidden, head))
    torch.testing.assert_close(found, wanted)
