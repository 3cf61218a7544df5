"""Cached states are the direct ones; bodies and heads come and go one by one; the disk holds one rollout batch."""

import gc
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine.models import WORDS, new_model, save_hf, tiny_policy
from engine.stages import Recorder, opd, run, sft
from safetensors.torch import load_file, save_file
from transformers import Gemma3TextConfig, GPT2Config, LlamaConfig

from opdctl.backends.contract import InputSpec, StageSpec, Stopped
from opdctl.engine import teacher_states
from opdctl.engine.batch import Sequence
from opdctl.engine.checkpoint import save_policy
from opdctl.engine.qwen3 import Qwen3Policy
from opdctl.engine.teacher_states import CachedStates, DirectStates, open_states
from opdctl.errors import StageRefused

torch.set_num_threads(1)

SEQUENCES = [
    Sequence((3, 4, 5), (6, 7, 8, 2), 1),
    Sequence((9,), (10, 11), 2),
    Sequence((3, 4, 5), (12, 2), 1),
    Sequence((12, 13, 14, 15, 16, 17, 18), (19,), 3),
    Sequence((5, 6), (), 4),
    Sequence((20, 21, 22), (23, 24, 25), 5),
]
LLAMA = {"vocab_size": len(WORDS), "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
LLAMA |= {"num_attention_heads": 2, "num_key_value_heads": 1, "eos_token_id": 2, "pad_token_id": 0, "bos_token_id": 1}
GPT2 = {"vocab_size": len(WORDS), "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64, "eos_token_id": 2}
GPT2 |= {"pad_token_id": 0, "bos_token_id": 1}


def qwen3(folder: Path, seed: int, **shape) -> InputSpec:
    save_policy(*tiny_policy(seed, **shape), folder, dtype=torch.float32)
    return InputSpec("teachers", folder.name, str(folder))


def transformers_model(folder: Path, kind: str) -> InputSpec:
    if kind == "llama-untied":
        save_hf(LlamaConfig(**LLAMA), folder)
    elif kind == "gemma3-tied":
        save_hf(Gemma3TextConfig(**LLAMA, head_dim=8, query_pre_attn_scalar=8), folder)
    elif kind == "gpt2-tied":
        save_hf(GPT2Config(**GPT2), folder)
    else:
        save_hf(LlamaConfig(**LLAMA), folder, max_shard_size="8KB")
        assert not (folder / "model.safetensors").exists()
    return InputSpec("teachers", kind, str(folder))


def spec_for(folder: Path, how: str = "cached", **resources) -> StageSpec:
    given = {"teacher_states": how, "micro_batch_tokens": 14, **resources}
    return opd(folder / "opd", folder, {}, {"form": "full_vocab"}, resources=given)


def pair(folder: Path, teachers: list[InputSpec], precision: str = "float32"):
    student = tiny_policy()[0].to(torch.bfloat16 if precision == "bfloat16" else torch.float32)
    return [open_states(spec_for(folder, how), teachers, precision, student) for how in ("direct", "cached")]


KINDS = ["qwen3-tied", "qwen3-untied", "llama-untied", "gemma3-tied", "gpt2-tied", "llama-sharded"]


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_cached_states_and_heads_are_the_direct_ones(tmp_path, kind, precision):
    if kind.startswith("qwen3"):
        own = qwen3(tmp_path / "own", 1, tie_word_embeddings=kind == "qwen3-tied", hidden_size=24)
    else:
        own = transformers_model(tmp_path / "own", kind)
    direct, cached = pair(tmp_path, [own, qwen3(tmp_path / "other", 2)], precision)
    assert isinstance(direct, DirectStates)
    assert isinstance(cached, CachedStates)
    wanted = {0: [0, 2, 3, 4], 1: [1, 5]}
    tolerance = 1e-5 if precision == "float32" else 0.1
    for states in (direct, cached):
        states.begin(SEQUENCES, wanted)
    for number, rows in ((0, [0, 2]), (1, [5, 1]), (0, [3]), (0, [4]), (0, [4, 3])):
        (hidden, head), (theirs, their_head) = (states.get(number, rows, then=1) for states in (cached, direct))
        assert torch.equal(head, their_head)
        assert hidden.dtype == theirs.dtype
        assert not hidden.requires_grad
        torch.testing.assert_close(hidden, theirs, atol=tolerance, rtol=tolerance)
    for states in (direct, cached):
        states.close()


def test_once_a_body_was_read_its_head_comes_from_the_file_alone(tmp_path, monkeypatch):
    _, cached = pair(tmp_path, [qwen3(tmp_path / "own", 1)])
    cached.begin(SEQUENCES, {0: range(6)})
    for file in ("config.json", "tokenizer.json"):
        (tmp_path / "own" / file).unlink()
    monkeypatch.setattr(teacher_states, "map_policy", None)
    assert torch.equal(cached.get(0, [0])[1], tiny_policy(1)[0].head())
    cached.close()


def test_bodies_are_read_one_after_the_other(tmp_path, monkeypatch):
    alive: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
    seen = []
    read = teacher_states.map_policy

    def watched(*given, **options):
        gc.collect()
        seen.append(len(alive))
        policy = read(*given, **options)
        alive.add(policy)
        return policy

    monkeypatch.setattr(teacher_states, "map_policy", watched)
    _, cached = pair(tmp_path, [qwen3(tmp_path / str(seed), seed) for seed in range(4)])
    cached.begin(SEQUENCES, {number: [number] for number in range(4)})
    gc.collect()
    assert seen == [0, 0, 0, 0]
    assert len(alive) == 0
    cached.close()


@pytest.mark.parametrize(("resident", "most"), [(1, 1), (2, 2), (9, 2)])
def test_no_more_than_two_heads_are_in_memory(tmp_path, monkeypatch, resident, most):
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    seen = []
    read = teacher_states._Checkpoint.head

    def watched(checkpoint):
        head = read(checkpoint)
        alive.add(head)
        seen.append(len(alive))
        return head

    monkeypatch.setattr(teacher_states._Checkpoint, "head", watched)
    teachers = [qwen3(tmp_path / str(seed), seed) for seed in range(4)]
    spec = spec_for(tmp_path, resident_teachers=resident)
    cached = open_states(spec, teachers, "float32", tiny_policy()[0])
    cached.begin(SEQUENCES, {number: [number] for number in range(4)})
    order = [0, 1, 2, 3] * 2
    for number, then in zip(order, [*order[1:], None], strict=True):
        cached.get(number, [number], then=then)
    cached.close()
    assert max(seen) == most
    assert len(seen) == len(order)


def test_teachers_of_one_checkpoint_are_read_once(tmp_path, monkeypatch):
    read, bodies = teacher_states.map_policy, []
    monkeypatch.setattr(teacher_states, "map_policy", lambda *a, **k: bodies.append(a) or read(*a, **k))
    one, two = qwen3(tmp_path / "one", 1), qwen3(tmp_path / "two", 2)
    direct, cached = pair(tmp_path, [one, two, replace(one, label="again", weight=2.0)])
    for states in (direct, cached):
        states.begin(SEQUENCES, {0: [0], 1: [1], 2: [2, 3]})
        states.get(0, [0])
        states.get(2, [2], then=1)
    assert len(bodies) == 2
    torch.testing.assert_close(cached.get(2, [2, 3])[0], direct.get(0, [2, 3])[0])
    assert direct._pool.loads == 2
    for states in (direct, cached):
        states.close()


def test_the_disk_holds_one_batch_and_nothing_in_the_end(tmp_path):
    spec = spec_for(tmp_path)
    folder = Path(spec.state) / "teacher-states"
    folder.mkdir(parents=True)
    save_file({"hidden": torch.zeros(1)}, folder / "left-by-a-kill.safetensors")
    cached = open_states(spec, [qwen3(tmp_path / "own", 1)], "float32", tiny_policy()[0])
    for rows in ([0, 1, 2, 3], [4, 5], [0, 5]):
        cached.begin(SEQUENCES, {0: rows})
        held = sum(len(load_file(file)["hidden"]) for file in folder.iterdir())
        assert held == sum(len(SEQUENCES[row].completion) for row in rows)
    cached.close()
    assert not folder.exists()


def test_a_new_model_can_be_a_cached_teacher(tmp_path):
    spec = replace(spec_for(tmp_path), new_model=new_model().model_dump())
    found = []
    for how in ("direct", "cached"):
        states = open_states(
            replace(spec, resources={**spec.resources, "teacher_states": how}),
            [InputSpec("teachers", "new", "")],
            "float32",
            tiny_policy()[0],
        )
        states.begin(SEQUENCES, {0: [0, 1]})
        found.append(states.get(0, [0, 1]))
        states.close()
    torch.testing.assert_close(found[0], found[1])


def test_a_head_that_no_stored_tensor_is_refuses_the_stage(tmp_path, monkeypatch):
    _, cached = pair(tmp_path, [qwen3(tmp_path / "own", 1)])
    monkeypatch.setattr(Qwen3Policy, "head", lambda policy: torch.ones(len(WORDS), 32))
    with pytest.raises(StageRefused, match="no stored tensor is the model's output matrix"):
        cached.begin(SEQUENCES, {0: [0]})


# ------------------------------------------------------------------------------------------------- whole stages


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> list[Path]:
    folders = []
    for seed in (0, 1, 2):
        spec = sft(tmp_path_factory.mktemp("model") / "sft", steps=30, seed=seed, train={"optimizer": {"lr": 1e-2}})
        run(spec)
        folders.append(Path(spec.output))
    return folders


def stage(folder: Path, models: list[Path], loss, how: str, **more) -> StageSpec:
    cells = [("math", "low"), ("math", "max"), ("code", "low"), ("code", "max")]
    teachers = dict(zip(cells, [models[1], models[2], models[1], models[0]], strict=True))
    resources = {"teacher_states": how, **more.pop("resources", {})}
    return opd(folder, models[0], teachers, loss, resources=resources, **more)


LOSSES = [
    {"form": "policy_gradient", "max_advantage": 5.0},
    {"form": "topk", "k": 8},
    {"form": "topk", "k": 8, "rest": "lumped_tail"},
    {"form": "overlap", "k": 8},
    {"form": "full_vocab"},
    {"form": "forward_kl"},
    {"form": "jsd", "beta": 0.3},
    {"form": "minillm", "discount": 0.5},
]


@pytest.mark.parametrize("micro_batch_tokens", [16_384, 40])
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: "-".join(map(str, loss.values())))
def test_every_loss_is_the_direct_one(tmp_path, models, loss, micro_batch_tokens):
    records = {how: Recorder(1) for how in ("direct", "cached")}
    for how, record in records.items():
        spec = stage(tmp_path / how, models, loss, how, resources={"micro_batch_tokens": micro_batch_tokens})
        with pytest.raises(Stopped):
            run(spec, record)
    (_, direct), (_, cached) = (record.events[0] for record in records.values())
    assert cached.keys() == direct.keys()
    for name, value in direct.items():
        assert cached[name] == pytest.approx(value, abs=1e-5), name


@pytest.mark.parametrize("stop_at", [1, 3])
def test_a_stopped_stage_ends_as_an_undisturbed_one(tmp_path, models, stop_at):
    whole, cut = (stage(tmp_path / name, models, {"form": "full_vocab"}, "cached") for name in ("whole", "cut"))
    run(whole)
    with pytest.raises(Stopped):
        run(cut, Recorder(stop_at))
    run(cut)
    assert Path(cut.output, "model.safetensors").read_bytes() == Path(whole.output, "model.safetensors").read_bytes()


def test_a_stage_killed_in_a_batch_ends_as_an_undisturbed_one(tmp_path, models, monkeypatch):
    """Between two saves, with half of a batch's states on disk; its latest update was stretched."""

    class Killed(BaseException):
        pass

    more = {"extrapolation": {"steps": [1, 2, 4], "scales": [1.5, 3.0], "prompts": 8}}
    loss = {"form": "policy_gradient", "max_advantage": 5.0}
    whole, cut = (stage(tmp_path / name, models, loss, "cached", **more) for name in ("whole", "cut"))
    record = Recorder()
    run(whole, record)
    assert max(metrics.get("extrapolation_scale", 1.0) for _, metrics in record.events) > 1
    read, reads = teacher_states.CachedStates._read, []

    def dying(states, *given):
        if len(reads) == 10:  # three checkpoints a batch: in the fourth batch, after the save at step 2
            raise Killed
        reads.append(given)
        read(states, *given)

    with monkeypatch.context() as patch:
        patch.setattr(teacher_states.CachedStates, "_read", dying)
        patch.setattr(teacher_states.CachedStates, "close", lambda states: None)  # a killed process cleans nothing
        with pytest.raises(Killed):
            run(cut)
    assert list((Path(cut.state) / "teacher-states").iterdir())
    run(cut)
    assert Path(cut.output, "model.safetensors").read_bytes() == Path(whole.output, "model.safetensors").read_bytes()
