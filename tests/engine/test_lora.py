"""Adapters: the same training as peft's, in a policy that holds the merged weights."""

from pathlib import Path

import pytest
import torch
from engine.models import save_hf
from engine.stages import MODEL, Recorder, opd, rlvr, run, spec_of, train
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from opdctl.backends.contract import InputSpec, StageSpec, Stopped
from opdctl.engine.batch import Sequence, collate
from opdctl.engine.checkpoint import load_policy
from opdctl.engine.lora import Adapters
from opdctl.engine.tokenizer import word_tokenizer
from opdctl.errors import StageRefused
from opdctl.settings import Lora

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft's
WORDS = MODEL["tokenizer"]["words"]
SHAPE = {
    "vocab_size": len(WORDS),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LORA = Lora(rank=2, alpha=8.0)
SEQUENCES = [Sequence((3, 4, 5), (6, 7, 8, 2)), Sequence((9,), (10, 11))]


@pytest.fixture(params=[LlamaConfig, Qwen3Config], ids=["transformers", "own-qwen3"])
def base(request, tmp_path) -> Path:
    model = save_hf(request.param(**SHAPE), tmp_path / "base")
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.5)
    model.save_pretrained(tmp_path / "teacher")
    for name in ("base", "teacher"):
        word_tokenizer(WORDS).save_pretrained(tmp_path / name)
    return tmp_path / "base"


def adapted(base: Path, lora: Lora = LORA) -> tuple:
    policy = load_policy(base)
    adapters = Adapters(policy, lora, seed=1)
    with torch.no_grad():
        for parameter in adapters.parameters.values():  # B is 0 at the beginning, and A's gradient with it
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)) * 0.1)
    adapters.merge()
    return policy, adapters


def stage(kind: str, folder: Path, base: Path, **more) -> StageSpec:
    steps = train(4, 8, lora={"rank": 2, "alpha": 8.0}, optimizer={"lr": 1e-2}, **more)
    if kind == "sft":
        config = {"data": {"tasks": ["math", "code"], "efforts": ["low", "max"]}, "train": steps}
        return spec_of(folder, "sft", config, [InputSpec("init", "base", str(base))])
    if kind == "rlvr":
        return rlvr(folder, base, train=steps, dynamic_sampling={"max_rounds": 2}, unfinished_reward=0.5)
    teachers = {(domain, effort): base.with_name("teacher") for domain in ("math", "code") for effort in ("low", "max")}
    return opd(folder, base, teachers, {"form": "full_vocab"}, train=steps)


def test_gradients_are_those_of_peft(base):
    policy, adapters = adapted(base)
    batch = collate(SEQUENCES, share_prefixes=False, pad_id=0)
    for _ in range(2):  # two micro-batches add up
        (policy.hidden(batch) @ policy.head().T).logsumexp(-1).sum().backward()
    config = LoraConfig(r=2, lora_alpha=8, target_modules=list(policy.linear_layers()))
    theirs = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    named = {name.removeprefix("base_model.model.").replace(".default", ""): p for name, p in theirs.named_parameters()}
    for name, parameter in adapters.parameters.items():
        named[name].data.copy_(parameter.data)
    logits = theirs(batch.ids_BT).logits[batch.rows_N, batch.cols_N]
    (2 * logits.logsumexp(-1).sum()).backward()
    assert {name for name, p in named.items() if p.requires_grad} == adapters.parameters.keys()
    for name, parameter in adapters.parameters.items():
        torch.testing.assert_close(parameter.grad, named[name].grad, atol=1e-4, rtol=1e-4)
    assert all(weight.grad is None for weight in policy.parameters())


def test_the_saved_adapter_on_its_base_is_the_published_model_to_peft(base, tmp_path):
    spec = stage("sft", tmp_path / "sft", base)
    run(spec)
    ids = torch.tensor([[3, 4, 5, 6, 7]])
    published = AutoModelForCausalLM.from_pretrained(spec.output)
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), Path(spec.output, "adapter"))
    torch.testing.assert_close(published(ids).logits, theirs(ids).logits, atol=1e-4, rtol=1e-4)
    before, after = (load_file(folder / "model.safetensors") for folder in (base, Path(spec.output)))
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {name for name in before if name.endswith("_proj.weight")}


@pytest.mark.parametrize("kind", ["sft", "rlvr", "opd"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_stopped_stage_saves_its_adapters_alone_and_ends_as_an_undisturbed_one(base, tmp_path, kind, precision):
    whole, cut = (stage(kind, tmp_path / name, base, precision=precision) for name in ("whole", "cut"))
    run(whole)
    with pytest.raises(Stopped):
        run(cut, Recorder(stop_at=1))
    state = load_file(next(Path(cut.state).glob("step-*")) / "state.safetensors")
    assert all(".lora_" in name for name in state if not name.startswith("extra."))  # of OPD: the canary
    run(cut)
    for name in ("model.safetensors", "adapter/adapter_model.safetensors", "adapter/adapter_config.json"):
        assert Path(cut.output, name).read_bytes() == Path(whole.output, name).read_bytes()
    assert Path(whole.output, "model.safetensors").read_bytes() != Path(base, "model.safetensors").read_bytes()


def test_only_the_named_targets_are_adapted_and_others_refused(base):
    policy, adapters = adapted(base, Lora(rank=2, alpha=2.0, targets=["q_proj", "up_proj"]))
    assert {name.split(".")[-3] for name in adapters.parameters} == {"q_proj", "up_proj"}
    assert policy.head().requires_grad is False
    with pytest.raises(StageRefused, match="no linear layers called w1"):
        Adapters(load_policy(base), Lora(rank=2, alpha=2.0, targets=["w1"]), seed=0)
