"""One optimizer step in verl and in the embedded engine, from the same folder on the same batch: equal weights."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import verl_step
from safetensors.torch import load_file
from torch.testing import assert_close
from verl.trainer.distillation.losses import distillation_ppo_loss
from verl.utils import tensordict_utils
from verl.workers.utils.losses import sft_loss
from verl_batch import actor, distillation
from verl_step import OPTIMIZER, SCHEDULE, SEQUENCES, nested

from opdctl.backends.verl.layout import SETTINGS_VARIABLE
from opdctl.engine import losses, vocab
from opdctl.engine.batch import Sequence, collate
from opdctl.engine.checkpoint import load_policy, new_policy, save_policy
from opdctl.engine.optim import AdamW, learning_rate
from opdctl.settings import NewModel, Optimizer

WORDS = ["<pad>", "<bos>", "<eos>", *"abcdefghij"]
SHAPE = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}
K = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return model_folder(tmp_path_factory.mktemp("student"), 0)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    return model_folder(tmp_path_factory.mktemp("teacher"), 1)


def model_folder(path, seed):
    policy, tokenizer = new_policy(NewModel(source="new", shape=SHAPE, tokenizer={"words": WORDS}), seed)
    with torch.no_grad():
        policy.model.embed_tokens.weight.mul_(20)  # distributions that differ
    save_policy(policy, tokenizer, path, dtype=torch.float32)
    return path


@pytest.fixture(scope="module", autouse=True)
def one_process(tmp_path_factory):
    """A world of one, which all tests share: torch makes it once a process."""
    with pytest.MonkeyPatch.context() as patch:
        world = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        for name, value in world.items():
            patch.setenv(name, value)
        store = tmp_path_factory.mktemp("world") / "store"
        patch.setenv("DIST_INIT_METHOD", f"file://{store}")
        yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def embedded_step(folder, loss):
    """Weights after one step of the engine on `loss(policy, batch, hidden_ND)`."""
    policy = load_policy(folder)
    settings = Optimizer.model_validate(OPTIMIZER)
    adam = AdamW(dict(policy.named_parameters()), settings)
    batch = collate([Sequence(tuple(p), tuple(c)) for p, c in SEQUENCES], share_prefixes=False, pad_id=0)
    adam.zero_grad()
    loss(policy, batch, policy.hidden(batch)).backward()
    norm = adam.clip()
    adam.step(learning_rate(settings, 0, SCHEDULE["max_steps"]))
    return {name: parameter.detach() for name, parameter in policy.named_parameters()}, norm


def check(found, wanted, start):
    assert found.keys() >= wanted.keys()
    for name, tensor in wanted.items():
        assert_close(found[name], tensor, atol=1e-5, rtol=0)
    moved = max((wanted[name] - tensor).abs().max() for name, tensor in start.items())
    assert moved > 1e-3  # half of the peak rate: the first step of the warm-up counts


def start(folder):
    return {name: tensor.detach() for name, tensor in load_policy(folder).named_parameters()}


def cross_entropy(policy, batch, hidden_ND):
    logprobs_N, _ = vocab.token_logprobs(hidden_ND, policy.head(), batch.targets_N)
    return -logprobs_N.mean()


def test_sft(folder, tell):
    tell({"schedule": SCHEDULE})
    made = verl_step.worker(folder, partial(sft_loss, config=None))
    metrics = verl_step.train(made, verl_step.batch(SEQUENCES, sft=True))
    wanted, norm = embedded_step(folder, cross_entropy)
    check(verl_step.weights(made), wanted, start(folder))
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert norm > OPTIMIZER["max_grad_norm"]  # the clip acted
    rates = [learning_rate(Optimizer(**OPTIMIZER), step, SCHEDULE["max_steps"]) for step in range(2)]
    again = verl_step.train(made, verl_step.batch(SEQUENCES, sft=True))
    assert [metrics["lr"], again["lr"]] == pytest.approx(rates)


def scored(policy):
    """The teacher's log-probabilities [V] after every token, prompts included, as verl's teacher servers give them."""
    whole = [p + c for p, c in SEQUENCES]
    made = collate([Sequence((ids[0],), (*ids[1:], 0)) for ids in whole], share_prefixes=False, pad_id=0)
    with torch.no_grad():
        logprobs_NV = (policy.hidden(made) @ policy.head().T).log_softmax(-1)
    return logprobs_NV.split([len(ids) for ids in whole]), whole


@pytest.mark.parametrize("form", ["policy_gradient", "correction", "lumped_tail"])
def test_distillation(folder, teacher, tell, form):
    opd = {
        "max_advantage": 1.0,
        "rest": form,
        "weights": {"t0": 1.0},
        "outcome_weight": 0.0,
        "surrogate": {"form": "clip"},
        "mismatch": None,
    }
    tell({"schedule": SCHEDULE, "opd": opd})
    mode = "opdctl_policy_gradient" if form == "policy_gradient" else "opdctl_reverse_kl_topk"
    config = actor(loss_agg_mode="seq-mean-token-mean")
    made = verl_step.worker(
        folder, partial(distillation_ppo_loss, config=config, distillation_config=distillation(mode, topk=K))
    )
    data = verl_step.batch(SEQUENCES, sft=False)
    teacher_policy, student = load_policy(teacher), load_policy(folder)
    parts, whole = scored(teacher_policy)
    if form == "policy_gradient":
        ids = [torch.tensor([*row[1:], 0])[:, None] for row in whole]
        values = [part.gather(-1, at) for part, at in zip(parts, ids, strict=True)]
    else:
        tops = [part.topk(K) for part in parts]
        ids, values = [top.indices for top in tops], [top.values for top in tops]
    data["teacher_ids"], data["teacher_logprobs"] = nested(ids), nested(values)
    with torch.no_grad():
        batch = collate([Sequence(tuple(p), tuple(c)) for p, c in SEQUENCES], share_prefixes=False, pad_id=0)
        old_N, _ = vocab.token_logprobs(student.hidden(batch), student.head(), batch.targets_N)
        hidden_NE = teacher_policy.hidden(batch)
    data["old_log_probs"] = nested(old_N.split([len(completion) for _, completion in SEQUENCES]))
    tensordict_utils.assign_non_tensor(
        data,
        global_batch_size=len(SEQUENCES),
        distillation_use_topk=form != "policy_gradient",
        distillation_only=form != "policy_gradient",
    )

    def loss(policy, batch, hidden_ND):
        weights_N = losses.token_weights(
            batch.sequence_N, how="sequence_mean", total_tokens=len(old_N), total_sequences=len(SEQUENCES)
        )
        if form != "policy_gradient":
            top = vocab.teacher_topk(hidden_NE, teacher_policy.head(), K)
            return vocab.topk_reverse_kl(hidden_ND, policy.head(), *top, rest=form, weights_N=weights_N)[0]
        policy_N, _ = vocab.token_logprobs(hidden_ND, policy.head(), batch.targets_N)
        teacher_N, _ = vocab.token_logprobs(hidden_NE, teacher_policy.head(), batch.targets_N)
        advantages_N = losses.opd_advantage(teacher_N, policy_N, 1.0)
        loss_N, _ = losses.clipped_policy_loss(policy_N, old_N, advantages_N, low=0.2, high=0.2)
        return (loss_N * weights_N).sum()

    metrics = verl_step.train(made, data)
    wanted, norm = embedded_step(folder, loss)
    check(verl_step.weights(made), wanted, start(folder))
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)


def test_two_ranks_with_unequal_tokens_make_the_step_of_one_process(folder, tell, tmp_path):
    tell({"schedule": SCHEDULE})
    script, output = Path(verl_step.__file__), tmp_path / "weights.safetensors"
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    alone = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "DIST_INIT_METHOD")
    environment = {name: value for name, value in os.environ.items() if name not in alone}
    done = subprocess.run(
        [*command, str(script), str(folder), str(output)], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert os.environ[SETTINGS_VARIABLE] in environment.values()
    wanted, _ = embedded_step(folder, cross_entropy)
    check(load_file(output), wanted, start(folder))
    tokens = [sum(len(completion) for _, completion in SEQUENCES[rank::2]) for rank in range(2)]
    assert tokens[0] != tokens[1]
