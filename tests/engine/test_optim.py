import math

import pytest
import torch
from safetensors.torch import load, save
from torch import nn

from opdctl.engine.optim import AdamW, learning_rate
from opdctl.errors import OpdctlError
from opdctl.settings import Optimizer

torch.set_num_threads(1)

# ----------------------------------------------------------------------------------------------------- schedules


def rates(max_steps=20, **settings):
    optimizer = Optimizer(lr=1.0, **settings)
    return [learning_rate(optimizer, step, max_steps) for step in range(max_steps + 1)]


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine", "wsd"])
def test_warm_up_rises_evenly_from_the_first_step_to_the_peak(schedule):
    found = rates(schedule=schedule, warmup_steps=4)
    assert found[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])


@pytest.mark.parametrize("schedule", ["linear", "cosine", "wsd"])
@pytest.mark.parametrize("ratio", [0.0, 0.1])
def test_rates_fall_from_the_peak_to_their_last_ratio_and_never_rise(schedule, ratio):
    found = rates(schedule=schedule, warmup_steps=4, min_lr_ratio=ratio)
    assert found[20] == pytest.approx(ratio, abs=1e-12)
    assert found[19] > ratio  # the last step still learns
    assert found[4:] == sorted(found[4:], reverse=True)


def test_linear_and_cosine_are_half_way_in_the_middle():
    assert rates(schedule="linear", warmup_steps=4)[12] == pytest.approx(0.5)
    assert rates(schedule="cosine", warmup_steps=4)[12] == pytest.approx(0.5)
    assert rates(schedule="cosine", warmup_steps=4)[8] == pytest.approx((1 + math.cos(math.pi / 4)) / 2)


def test_wsd_is_stable_until_the_last_fraction_of_the_steps():
    found = rates(schedule="wsd", warmup_steps=4, decay_fraction=0.4)
    assert found[4:13] == [1.0] * 9
    assert found[12:] == pytest.approx([1 - i / 8 for i in range(9)])


def test_wsd_with_decay_longer_than_the_run_starts_to_fall_after_the_warm_up():
    assert rates(schedule="wsd", warmup_steps=4, decay_fraction=1.0) == rates(schedule="linear", warmup_steps=4)


def test_constant_holds_and_does_not_depend_on_the_length():
    assert rates(schedule="constant") == [1.0] * 21
    assert rates(50, schedule="constant", warmup_steps=4)[:21] == rates(20, schedule="constant", warmup_steps=4)


def test_warm_up_as_long_as_the_run_does_not_divide_by_zero():
    assert rates(4, schedule="linear", warmup_steps=4)[:4] == pytest.approx([0.2, 0.4, 0.6, 0.8])


# --------------------------------------------------------------------------------------------------------- AdamW

SETTINGS = Optimizer(lr=0.1, weight_decay=0.1, max_grad_norm=1.0)


def network(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator).to(dtype)
    return model


def optimizer_of(model, settings=SETTINGS):
    return AdamW(dict(model.named_parameters()), settings)


def train(model, optimizer, steps):
    for step in steps:
        inputs = torch.randn(5, 3, generator=torch.Generator().manual_seed(step)).to(model[0].weight.dtype)
        optimizer.zero_grad()
        model(inputs).float().square().mean().backward()
        optimizer.clip()
        optimizer.step(0.01 * (step + 1))


def slow_adamw(weight, gradients, rates, settings):
    """One scalar weight, by the text of the algorithm (arXiv 1711.05101), gradients clipped."""
    m = v = 0.0
    beta1, beta2 = settings.betas
    for t, (gradient, lr) in enumerate(zip(gradients, rates, strict=True), 1):
        gradient *= min(1.0, settings.max_grad_norm / abs(gradient))
        m = beta1 * m + (1 - beta1) * gradient
        v = beta2 * v + (1 - beta2) * gradient**2
        weight -= lr * settings.weight_decay * weight
        weight -= lr * (m / (1 - beta1**t)) / (math.sqrt(v / (1 - beta2**t)) + settings.eps)
    return weight


def test_updates_agree_with_the_algorithm_on_a_scalar():
    weight = nn.Parameter(torch.tensor([0.7], dtype=torch.float64))
    optimizer = AdamW({"w": weight}, SETTINGS)
    gradients, steps = [0.3, -4.0, 0.01, 2.0], [0.1, 0.05, 0.2, 0.01]
    for gradient, lr in zip(gradients, steps, strict=True):
        optimizer.zero_grad()
        (weight * gradient).sum().backward()
        assert optimizer.clip() == pytest.approx(abs(gradient))
        optimizer.step(lr)
    # torch adds 1e-6 to the norm it divides by
    assert weight.item() == pytest.approx(slow_adamw(0.7, gradients, steps, SETTINGS), rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_run_resumed_from_its_state_ends_bit_identical(dtype):
    undisturbed = network(dtype)
    train(undisturbed, optimizer_of(undisturbed), range(6))

    first = network(dtype)
    optimizer = optimizer_of(first)
    train(first, optimizer, range(3))
    saved = save({name: tensor.contiguous() for name, tensor in optimizer.state_tensors().items()})
    weights = {name: tensor.clone() for name, tensor in first.state_dict().items()}

    second = network(dtype)
    second.load_state_dict(weights)
    resumed = optimizer_of(second)
    resumed.load_state_tensors(load(saved))
    train(second, resumed, range(3, 6))
    for name, tensor in undisturbed.state_dict().items():
        assert torch.equal(tensor, second.state_dict()[name]), name


def test_loading_state_of_before_the_first_step_forgets_later_moments():
    model = network()
    fresh = optimizer_of(model).state_tensors()
    optimizer = optimizer_of(model)
    train(model, optimizer, range(2))
    optimizer.load_state_tensors(fresh)
    assert optimizer.state_tensors() == {}


def test_bfloat16_weights_gather_updates_too_small_for_them():
    weight = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    optimizer = AdamW({"w": weight}, Optimizer(lr=1e-4))
    for _ in range(100):
        optimizer.zero_grad()
        weight.sum().backward()
        optimizer.clip()
        optimizer.step(1e-4)
    assert weight.item() == pytest.approx(0.99, abs=0.004)
    assert optimizer.state_tensors()["master/w"].item() == pytest.approx(0.99, abs=1e-4)
    assert optimizer.state_tensors()["exp_avg/w"].dtype == torch.float32


def test_clip_returns_the_norm_before_and_leaves_at_most_the_limit():
    model = network()
    optimizer = optimizer_of(model)
    (100 * model(torch.ones(1, 3))).sum().backward()
    norms = [parameter.grad.norm() for parameter in model.parameters()]
    assert optimizer.clip() == pytest.approx(float(torch.stack(norms).norm()))
    clipped = torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm()
    assert float(clipped) == pytest.approx(1.0, rel=1e-4)


def test_clip_reports_a_norm_that_is_not_finite_and_touches_no_weight():
    weight = nn.Parameter(torch.ones(2))
    optimizer = AdamW({"w": weight}, SETTINGS)
    weight.grad = torch.tensor([1.0, math.nan])
    assert math.isnan(optimizer.clip())
    assert weight.tolist() == [1.0, 1.0]


def test_frozen_parameters_and_those_without_gradient_stay():
    model = network()
    model[0].weight.requires_grad_(False)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = optimizer_of(model)
    model[1].bias.sum().backward()
    optimizer.clip()
    optimizer.step(0.1)
    changed = {n for n, parameter in model.named_parameters() if not torch.equal(parameter, before[n])}
    assert changed == {"1.bias"}
    assert set(optimizer.state_tensors()) == {"step/1.bias", "exp_avg/1.bias", "exp_avg_sq/1.bias"}


@pytest.mark.parametrize("change", ["missing", "renamed", "no_master"])
def test_state_of_another_model_is_refused_and_nothing_taken_over(change):
    model = network(torch.bfloat16)
    optimizer = optimizer_of(model)
    train(model, optimizer, range(1))
    state = {name: tensor.clone() for name, tensor in optimizer.state_tensors().items()}
    if change == "missing":
        del state["exp_avg_sq/0.bias"]
    elif change == "renamed":
        state["master/2.bias"] = state.pop("master/0.bias")
    else:
        state = {name: tensor for name, tensor in state.items() if not name.startswith("master/")}
    other = optimizer_of(network(torch.bfloat16))
    with pytest.raises(OpdctlError, match="is not of this model"):
        other.load_state_tensors(state)
    assert not any(name.startswith("step/") for name in other.state_tensors())
