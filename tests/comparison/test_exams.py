"""Names without their seed."""

import pytest

from opdctl.comparison import unseeded


@pytest.mark.parametrize(
    ("name", "plain", "seed"),
    [
        ("sft", "sft", None),
        ("sft[seed=0]", "sft", 0),
        ("mopd[loss=topk,seed=12]", "mopd[loss=topk]", 12),
        ("mopd[seed=1,loss=topk]", "mopd[loss=topk]", 1),
        ("mopd[a=b,seed=1,loss=topk]", "mopd[a=b,loss=topk]", 1),
        ("mopd[reseed=1]", "mopd[reseed=1]", None),
    ],
)
def test_the_axis_seed_is_taken_out(name, plain, seed):
    assert unseeded(name) == (plain, seed)
