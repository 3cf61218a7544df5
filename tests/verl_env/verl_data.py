"""Stages with files that exist, and verl's configuration as it would be rendered for them."""

from dataclasses import replace
from pathlib import Path

import torch
from engine import stages
from hydra import compose, initialize_config_module
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from opdctl.backends.contract import InputSpec, StageSpec
from opdctl.backends.verl import data, render
from opdctl.engine.checkpoint import new_policy, save_policy
from opdctl.settings import NewModel, Resources
from opdctl.workers import VerlWorkers

CONFIG = {"sft": "sft_trainer_engine", "rlvr": "ppo_trainer", "opd": "ppo_trainer"}
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SHAPE = stages.MODEL["shape"] | {"max_position_embeddings": 256}


def words_model(folder: Path) -> Path:
    """Of the chain tasks: one token a word."""
    policy, tokenizer = new_policy(NewModel.model_validate(stages.MODEL), 0)
    save_policy(policy, tokenizer, folder, dtype=torch.float32)
    return folder


def chat_model(folder: Path) -> Path:
    """Byte-level BPE whose merges cross words, with a chat template."""
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["3+4=7", "what is 3+4=?", "assistant\n7 is it"] * 20, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>", clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = CHATML
    # the network's special tokens are those of its own word list: as many words as the vocabulary has
    given = {"source": "new", "shape": SHAPE, "tokenizer": {"words": [f"w{i}" for i in range(len(tokenizer))]}}
    policy, _ = new_policy(NewModel.model_validate(given), 0)
    policy.eos_ids, policy.pad_id = (tokenizer.eos_token_id,), tokenizer.pad_token_id
    policy.config.eos_token_id, policy.config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    policy.config.bos_token_id = None
    save_policy(policy, tokenizer, folder, dtype=torch.float32)
    return folder


def on_verl(spec: StageSpec, init: Path | None = None) -> StageSpec:
    """The stage on verl on a CPU; `init` in place of the model that it starts from."""
    resources = Resources.model_validate({"micro_batch_tokens": 4096}).model_dump(mode="json")
    workers = VerlWorkers(python="python", device="cpu").model_dump(mode="json")
    inputs = [
        replace(given, path=str(init)) if init and given.role in ("init", "student") else given for given in spec.inputs
    ]
    return replace(spec, backend="verl", resources=resources, workers=workers, inputs=inputs)


def config_of(spec: StageSpec):
    """What verl composes of the overrides."""
    with initialize_config_module("verl.trainer.config", version_base=None):
        rendered = [item for item in render.overrides(spec).arguments() if not item.startswith("hydra")]
        return compose(CONFIG[spec.kind], rendered)


def written(spec: StageSpec):
    return data.write(spec, stages.Recorder())


def input_of(path: Path, role: str, label: str = "") -> InputSpec:
    return InputSpec(role, label or role, str(path))
