from functools import wraps

import pytest
import torch
from engine.models import WORDS, save_hf
from transformers import (
    CohereConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    LlamaModel,
    MambaConfig,
    PhiConfig,
    Qwen3Config,
)

from opdctl.engine.batch import Sequence, collate
from opdctl.engine.causal_lm import CausalLMPolicy
from opdctl.engine.checkpoint import load_policy, load_tokenizer, save_policy
from opdctl.engine.sampling import sample
from opdctl.errors import OpdctlError

torch.set_num_threads(1)

SPECIAL = {"vocab_size": len(WORDS), "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SHAPE = {
    **SPECIAL,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
HEAD = {"head_dim": 8}
SLIDING = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
CONFIGS = [
    pytest.param(lambda: LlamaConfig(**SHAPE, attention_dropout=0.3), id="llama"),
    pytest.param(lambda: Gemma3TextConfig(**SHAPE, **HEAD, **SLIDING, query_pre_attn_scalar=8), id="gemma3-sliding"),
    pytest.param(lambda: GPT2Config(**SPECIAL, n_embd=32, n_layer=2, n_head=4, n_positions=64), id="gpt2-dropout"),
    pytest.param(lambda: Qwen3Config(**SHAPE, **HEAD, attention_bias=True), id="qwen3-with-bias"),
]


@pytest.fixture(params=CONFIGS)
def pair(request, tmp_path):
    model = save_hf(request.param(), tmp_path)
    policy = load_policy(tmp_path)
    assert isinstance(policy, CausalLMPolicy)
    policy.train()
    return policy, model


SEQUENCES = [Sequence((3, 4, 5), (6, 7, 8, 2)), Sequence((9,), (10, 11)), Sequence((12, 13, 14, 15, 16, 17, 18), (19,))]


def test_logits_and_gradients_are_those_of_the_model(pair):
    policy, model = pair
    batch = collate(SEQUENCES, share_prefixes=policy.shares_prefixes, pad_id=policy.pad_id)
    ours = policy.hidden(batch) @ policy.head().T
    theirs = torch.cat(
        [model(torch.tensor([[*s.prompt, *s.completion]])).logits[0, len(s.prompt) - 1 : -1] for s in SEQUENCES]
    )
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    ours.logsumexp(-1).sum().backward()
    theirs.logsumexp(-1).sum().backward()
    expected = dict(model.named_parameters())
    for name, weight in policy.network.named_parameters():
        torch.testing.assert_close(weight.grad, expected[name].grad, atol=1e-4, rtol=1e-4)


def test_shared_prefixes_give_the_states_and_gradients_of_plain_rows_or_are_refused(pair, request):
    policy, _ = pair
    group = [Sequence((3, 4, 5, 6), (7, 8, 2), 1), Sequence((3, 4, 5, 9), (10,), 1), Sequence((3, 4, 5), (11, 12), 1)]
    shared = collate([*group, SEQUENCES[2]], share_prefixes=True, pad_id=0)
    assert shared.mask_BTT is not None
    windowed = "sliding" in request.node.callspec.id
    assert policy.shares_prefixes != windowed
    if windowed:
        with pytest.raises(ValueError, match="reads no tree masks"):
            policy.hidden(shared)
        return
    gradients = []
    for batch in (shared, collate([*group, SEQUENCES[2]], share_prefixes=False, pad_id=0)):
        policy.zero_grad()
        states = policy.hidden(batch)
        states.square().sum().backward()
        gradients.append([states.detach(), *(weight.grad for weight in policy.parameters() if weight.grad is not None)])
    for ours, plain in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, plain, atol=1e-4, rtol=1e-4)


def test_a_windowed_model_shares_prefixes_as_long_as_its_window_holds_a_sequence(tmp_path):
    windows = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
    save_hf(Gemma3TextConfig(**SHAPE, **HEAD, **windows, query_pre_attn_scalar=8), tmp_path)
    policy = load_policy(tmp_path)
    for length, shares in ((16, True), (17, False)):
        group = [Sequence((3, 4, 5), tuple(range(6 + i, 3 + length + i)), 1) for i in range(2)]
        batch = policy.batch(group)
        assert (batch.mask_BTT is not None) == shares
        plain = collate(group, share_prefixes=False, pad_id=0)
        torch.testing.assert_close(policy.hidden(batch), policy.hidden(plain), atol=1e-4, rtol=1e-4)


def test_groups_with_long_completions_get_rows_of_their_own(tmp_path):
    save_hf(LlamaConfig(**SHAPE | {"max_position_embeddings": 4096}), tmp_path)
    policy = load_policy(tmp_path)
    for length, shares in ((8, True), (2000, False)):
        group = [Sequence((3,) * 40, (4 + i,) * length, 1) for i in range(8)]
        assert (policy.batch(group).mask_BTT is not None) == shares


def test_a_network_that_does_not_heed_masks_shares_no_prefixes(tmp_path, monkeypatch):
    save_hf(LlamaConfig(**SHAPE), tmp_path)
    forward = LlamaModel.forward

    @wraps(forward)
    def deaf(self, *, attention_mask=None, **kwargs):
        hears = attention_mask is None or attention_mask.dim() == 2
        return forward(self, attention_mask=attention_mask if hears else None, **kwargs)

    monkeypatch.setattr(LlamaModel, "forward", deaf)
    assert not load_policy(tmp_path).shares_prefixes


def test_greedy_generation_is_that_of_transformers(pair):
    policy, model = pair
    prompts = [[3, 4, 5, 6, 7], [8, 9], [10, 11, 12]]
    rollout = sample(
        policy,
        prompts,
        group_size=2,
        max_completion_tokens=14,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        seed=0,
        keys=[0, 1, 2],
        greedy=True,
    )
    for i, prompt in enumerate(prompts):
        out = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=14)[0, len(prompt) :].tolist()
        assert rollout.completions[2 * i] == rollout.completions[2 * i + 1] == out


def test_sampling_log_probabilities_are_those_of_a_plain_forward_pass(pair, monkeypatch):
    policy, _ = pair
    monkeypatch.setattr(policy, "eos_ids", (2, 5, 9, 12, 20))  # rows end at different steps and are dropped
    prompts = [[3, 4, 5, 6, 7], [8, 9], [10, 11, 12]]
    rollout = sample(
        policy,
        prompts,
        group_size=4,
        max_completion_tokens=12,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        seed=0,
        keys=[0, 1, 2],
    )
    assert any(rollout.finished)
    sequences = [Sequence(tuple(prompts[i // 4]), tuple(c)) for i, c in enumerate(rollout.completions)]
    batch = collate(sequences, share_prefixes=False, pad_id=0)
    with torch.no_grad():
        logprobs_NV = (policy.hidden(batch) @ policy.head().T).log_softmax(-1)
    expected = logprobs_NV.gather(-1, batch.targets_N[:, None])[:, 0]
    torch.testing.assert_close(rollout.sampling_logprobs_N, expected, atol=1e-4, rtol=1e-4)


def test_a_saved_policy_is_the_same_model(pair, tmp_path):
    policy, model = pair
    with torch.no_grad():
        policy.head().add_(0.01)
        model.get_output_embeddings().weight.add_(0.01)
    save_policy(policy, load_tokenizer(tmp_path), tmp_path / "saved", dtype=torch.float32)
    again = load_policy(tmp_path / "saved")
    batch = collate(SEQUENCES, share_prefixes=False, pad_id=0)
    torch.testing.assert_close(again.hidden(batch), policy.hidden(batch), atol=0, rtol=0)
    assert (again.eos_ids, again.pad_id) == (policy.eos_ids, policy.pad_id)


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(lambda: Gemma2Config(**SHAPE, **HEAD, query_pre_attn_scalar=8), id="soft-capped"),
        pytest.param(lambda: CohereConfig(**SHAPE, logit_scale=0.5), id="scaled"),
        pytest.param(lambda: PhiConfig(**SHAPE), id="biased"),
    ],
)
def test_logits_that_are_not_a_product_are_refused(config, tmp_path):
    save_hf(config(), tmp_path)
    with pytest.raises(OpdctlError, match="logits are not the last hidden states times the output matrix"):
        load_policy(tmp_path)


def test_a_model_without_a_key_value_cache_is_refused(tmp_path):
    save_hf(MambaConfig(**SPECIAL, hidden_size=32, num_hidden_layers=2, state_size=4), tmp_path)
    with pytest.raises(OpdctlError, match="MambaForCausalLM"):
        load_policy(tmp_path)


def test_more_tokens_than_positions_are_refused(tmp_path):
    save_hf(LlamaConfig(**SHAPE), tmp_path)
    batch = collate([Sequence((3,), (4,) * 65)], share_prefixes=False, pad_id=0)
    with pytest.raises(OpdctlError, match="max_position_embeddings is 64"):
        load_policy(tmp_path).hidden(batch)
