"""Our divergences and MiniLLM's credit against TRL, where it is installed (MiniLLM is in 1.0, no longer in 1.16)."""

from types import SimpleNamespace

import pytest
import torch

from opdctl.engine.divergences import forward_kl, generalised_jsd
from opdctl.engine.opd_advantages import later_mean
from opdctl.engine.vocab import full_vocab_reverse_kl

pytestmark = [pytest.mark.peer, pytest.mark.filterwarnings("default")]  # the peer's own warnings are not ours
torch.set_num_threads(1)


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 0.9])
def test_divergence_is_that_of_gkd(beta):
    """TRL calls beta = 0 the forward KL."""
    peer = pytest.importorskip("trl.experimental.gkd", exc_type=ImportError)
    hidden, head = draw(20, 8).requires_grad_(), draw(50, 8, seed=1).requires_grad_()
    teacher = draw(20, 6, seed=2), draw(50, 6, seed=3)
    logits = (hidden @ head.T)[None], (teacher[0] @ teacher[1].T)[None]
    theirs = peer.GKDTrainer.generalized_jsd_loss(*logits, beta=beta, reduction="sum")
    if beta:
        ours, _ = generalised_jsd(hidden, head, *teacher, beta=beta, chunk=6)
    else:
        ours, _ = forward_kl(hidden, head, *teacher, chunk=6)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(*(torch.autograd.grad(loss, (hidden, head)) for loss in (ours, theirs)))


@pytest.mark.parametrize("discount", [0.5, 1.0])
def test_later_credit_is_the_advantage_that_minillm_gives_the_next_token(discount):
    """TRL's advantage of a token has its own log-ratio in it; ours begins after it, as the paper's R_{t+1} does."""
    peer = pytest.importorskip("trl.experimental.minillm", exc_type=ImportError)
    student, teacher = draw(3, 6) - 3, draw(3, 6, seed=1) - 3
    options = SimpleNamespace(gamma=discount, length_normalization=True)
    theirs = peer.MiniLLMTrainer._compute_advantage(options, student, teacher, torch.ones(3, 6))
    ours = later_mean((teacher - student).flatten(), [6, 6, 6], discount).view(3, 6)
    torch.testing.assert_close(ours[:, :-1], theirs[:, 1:])
    assert ours[:, -1].abs().max() == 0


def test_single_step_of_minillm_is_the_reverse_kl():
    peer = pytest.importorskip("trl.experimental.minillm", exc_type=ImportError)
    hidden, head, other = draw(7, 4), draw(9, 4, seed=1), draw(7, 4, seed=2)
    logprobs = ((part @ head.T).log_softmax(-1)[None] for part in (hidden, other))
    theirs = peer.MiniLLMTrainer._single_step_decomposition_loss(None, *logprobs, torch.ones(1, 7).bool())
    ours, _ = full_vocab_reverse_kl(hidden, head, other, head)
    torch.testing.assert_close(ours / 7, theirs)
