import pytest
import torch
from engine.models import tiny_policy
from transformers import AutoModelForCausalLM

from opdctl.engine import fused
from opdctl.engine.batch import Sequence, collate
from opdctl.engine.checkpoint import load_policy, save_policy
from opdctl.engine.sampling import sample
from opdctl.errors import OpdctlError

torch.set_num_threads(1)

SHAPES = [
    pytest.param({}, id="tied"),
    pytest.param({"tie_word_embeddings": False, "num_key_value_heads": 4, "rope_theta": 100.0}, id="untied"),
    pytest.param({"num_attention_heads": 6, "num_key_value_heads": 1, "rms_norm_eps": 1e-4}, id="one-key-head"),
]


@pytest.fixture(params=SHAPES)
def pair(request, tmp_path):
    """The same weights as our policy and as a transformers model."""
    policy, tokenizer = tiny_policy(**request.param)
    save_policy(policy, tokenizer, tmp_path, dtype=torch.float32)
    return policy, AutoModelForCausalLM.from_pretrained(tmp_path).eval()


def groups(completions: int = 3) -> list[Sequence]:
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(3, 29, (4, 6 + 7 * completions), generator=generator).tolist()
    return [
        Sequence((*row[: 4 + i], row[6 + j]), tuple(row[7 * j + 6 : 7 * j + 9 + i]), i + 1)
        for i, row in enumerate(ids)
        for j in range(completions)
    ]


def hf_logits(model, sequences) -> torch.Tensor:
    parts = []
    for sequence in sequences:
        ids = torch.tensor([[*sequence.prompt, *sequence.completion]])
        parts.append(model(ids).logits[0, len(sequence.prompt) - 1 : -1])
    return torch.cat(parts)


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("small", [128, 0], ids=["small-attention", "fused-attention"])
def test_logits_and_gradients_are_those_of_transformers(pair, share, small, monkeypatch):
    monkeypatch.setattr(fused, "SMALL", small)
    policy, model = pair
    sequences = groups()
    batch = collate(sequences, share_prefixes=share, pad_id=0)
    ours, theirs = policy.hidden(batch) @ policy.head().T, hf_logits(model, sequences)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)

    direction = torch.randn(ours.shape, generator=torch.Generator().manual_seed(0)) / len(ours)
    (ours * direction).sum().backward()
    (theirs * direction).sum().backward()
    expected = {name: weight.grad for name, weight in model.named_parameters()}
    assert expected.keys() == dict(policy.named_parameters()).keys()
    for name, weight in policy.named_parameters():
        torch.testing.assert_close(weight.grad, expected[name], atol=1e-5, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


def test_state_dicts_are_interchangeable(pair):
    policy, model = pair
    state = {name: tensor + 0.01 for name, tensor in policy.state_dict().items()}
    model.load_state_dict(state, strict=not policy.config.tie_word_embeddings)
    policy.load_state_dict({name: tensor for name, tensor in model.state_dict().items() if name in state})
    batch = collate(groups(1), share_prefixes=False, pad_id=0)
    ours = policy.hidden(batch) @ policy.head().T
    torch.testing.assert_close(ours, hf_logits(model, groups(1)), atol=1e-5, rtol=1e-5)


def test_greedy_generation_is_that_of_transformers(pair):
    policy, model = pair
    prompts = [[3, 4, 5, 6, 7], [8, 9], [10, 11, 12]]
    rollout = sample(
        policy,
        prompts,
        group_size=1,
        max_completion_tokens=20,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        seed=0,
        keys=[0, 1, 2],
        greedy=True,
    )
    for prompt, completion in zip(prompts, rollout.completions, strict=True):
        out = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=20)[0, len(prompt) :].tolist()
        assert completion == out


def test_gradients_hold_in_double_precision():
    policy = tiny_policy(num_hidden_layers=1, hidden_size=6, intermediate_size=5, head_dim=4)[0].double()
    batch = collate(groups(2)[:4], share_prefixes=True, pad_id=0)
    weights = list(policy.parameters())

    def logits(*_) -> torch.Tensor:
        return policy.hidden(batch) @ policy.head().T

    assert torch.autograd.gradcheck(logits, weights, atol=1e-5, fast_mode=True)


def test_bfloat16_stays_close_to_transformers(tmp_path):
    policy, tokenizer = tiny_policy()
    save_policy(policy, tokenizer, tmp_path, dtype=torch.bfloat16)
    ours = load_policy(tmp_path, dtype=torch.bfloat16)
    model = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert model.dtype == ours.head().dtype == torch.bfloat16
    batch = collate(groups(), share_prefixes=True, pad_id=0)
    logits, exact = ours.hidden(batch) @ ours.head().T, policy.hidden(batch) @ policy.head().T
    error, their_error = (logits - exact).abs().mean(), (hf_logits(model, groups()) - exact).abs().mean()
    assert error < 1.3 * their_error


def test_more_tokens_than_positions_are_refused():
    policy, _ = tiny_policy(max_position_embeddings=16)
    batch = collate([Sequence(tuple(range(3, 13)), tuple(range(3, 11)))], share_prefixes=False, pad_id=0)
    with pytest.raises(OpdctlError, match="max_position_embeddings is 16"):
        policy.hidden(batch)
    with pytest.raises(OpdctlError, match="17 tokens"):
        policy.prefill(torch.full((1, 10), 3), torch.tensor([10]), 7)


def test_a_long_tree_of_short_branches_fits():
    policy, _ = tiny_policy(max_position_embeddings=16)
    sequences = [Sequence(tuple(range(3, 13)), (3 + i,) * 6, 1) for i in range(8)]
    batch = collate(sequences, share_prefixes=True, pad_id=0)
    assert batch.ids_BT.shape[1] > 16
    assert policy.hidden(batch).shape == (48, 32)
