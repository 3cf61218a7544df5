"""One optimizer step of verl's FSDP2 engine on a CPU, as its trainers take it.

As a program, `torchrun ... verl_step.py FOLDER OUTPUT`, each rank trains on its share of the same batch, and the first
writes the new weights.
"""

import os
import sys
from functools import partial

import torch
import verl  # noqa: F401 -- loads the plug-in
from safetensors.torch import save_file
from tensordict import TensorDict
from torch import Tensor
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.workers.engine_workers import TrainingWorker, TrainingWorkerConfig
from verl.workers.utils.losses import sft_loss

LR = 3e-3
OPTIMIZER = {"lr": LR, "schedule": "linear", "warmup_steps": 1, "weight_decay": 0.1, "max_grad_norm": 0.5}
SCHEDULE = {"optimizer": OPTIMIZER, "max_steps": 4, "updates": 1}
# (prompt, completion): lengths, and so the tokens of two ranks that take turns, are unequal
SEQUENCES = [
    ([1, 5, 9], [7, 4, 8, 2]),
    ([1, 6], [3, 2]),
    ([1, 8, 8, 7], [4, 4, 9, 6, 5, 2]),
    ([1, 4], [2]),
]


def worker(folder, loss) -> TrainingWorker:
    """Settings as `opdctl.backends.verl.render` gives them."""
    single = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    made = TrainingWorker(
        TrainingWorkerConfig(
            model_type="language_model",
            model_config=HFModelConfig(
                path=str(folder),
                use_remove_padding=False,
                enable_gradient_checkpointing=False,
                override_config={"attn_implementation": "sdpa"},
            ),
            engine_config=FSDPEngineConfig(
                strategy="fsdp2",
                dtype="float32",
                mixed_precision=single,
                use_torch_compile=False,
                use_dynamic_bsz=True,
                max_token_len_per_gpu=12,  # so that a batch takes several passes
            ),
            optimizer_config=FSDPOptimizerConfig(
                lr=LR,
                betas=(0.9, 0.95),
                weight_decay=OPTIMIZER["weight_decay"],
                clip_grad=OPTIMIZER["max_grad_norm"],
                override_optimizer_config={"eps": 1e-8},
                total_training_steps=SCHEDULE["max_steps"],
            ),
            checkpoint_config=CheckpointConfig(),
        )
    )
    made.set_loss_fn(loss)
    made.reset()
    return made


def nested(parts) -> Tensor:
    return torch.nested.as_nested_tensor([torch.as_tensor(part) for part in parts], layout=torch.jagged)


def batch(sequences, *, sft) -> TensorDict:
    """Nested tensors as of `SFTTensorCollator`, or of the trainer of RL."""
    whole = [prompt + completion for prompt, completion in sequences]
    masks = [[0] * len(prompt) * sft + [1] * len(completion) for prompt, completion in sequences]
    tensors = {
        "input_ids": nested(whole),
        "position_ids": nested([torch.arange(len(ids)) for ids in whole]),
        "loss_mask": nested(masks),
    }
    if not sft:
        tensors |= {
            "prompts": nested([prompt for prompt, _ in sequences]),
            "responses": nested([completion for _, completion in sequences]),
            "response_mask": nested(masks),
        }
    data = TensorDict(tensors, batch_size=len(sequences))
    tensordict_utils.assign_non_tensor(data, temperature=1.0, pad_token_id=0, update_lr_scheduler=True)
    return data


def train(made: TrainingWorker, data: TensorDict) -> dict[str, float]:
    """Metrics of one optimizer step."""
    lengths = data["input_ids"].offsets().diff().tolist()
    tensordict_utils.assign_non_tensor_data(data, "global_token_num", lengths)
    return tensordict_utils.get(made.train_batch(data=data), "metrics")


def weights(made: TrainingWorker) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in made.engine.get_per_tensor_param()[0]}


def main(folder, output) -> None:
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    made = worker(folder, partial(sft_loss, config=None))
    train(made, batch(SEQUENCES[rank::ranks], sft=True))
    found = weights(made)
    if rank == 0:
        save_file({name: tensor.contiguous() for name, tensor in found.items()}, output)


if __name__ == "__main__":
    main(*sys.argv[1:])
