"""How much memory a training stage of the embedded engine takes at its peak, from the model's shape and the settings.

Symbols: P weights, D hidden size, L layers, I width of an MLP, H and K heads of queries and of keys, h size of a head,
V vocabulary, w bytes of a weight (4, or 2 in bfloat16), T tokens of a micro-batch.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opdctl.settings import NewModel, OpdSettings, RlvrSettings, SftSettings
from opdctl.workers import Resources

Training = SftSettings | RlvrSettings | OpdSettings
GIB = 2**30
PROCESS = 0.6 * GIB  # Python with PyTorch and transformers, on the CPU
_LOGITS = 48 * 2**20  # of one [C, V] tensor; see engine/chunks.py
_LOGIT_BUFFERS = 4


@dataclass(frozen=True)
class Shape:
    """Of a dense decoder with gated MLPs: Llama, Mistral, Qwen2, Qwen3, Gemma3."""

    vocab: int
    hidden: int
    layers: int
    mlp: int
    heads: int
    key_heads: int
    head: int
    tied: bool

    @property
    def layer_weights(self) -> int:
        attention = self.hidden * self.head * (2 * self.heads + 2 * self.key_heads)
        return attention + 3 * self.hidden * self.mlp

    @property
    def sides(self) -> int:
        """Inputs and outputs of a layer's matrices, added up: the numbers of adapters of rank 1."""
        return 7 * self.hidden + 2 * (self.heads + self.key_heads) * self.head + 3 * self.mlp

    @property
    def weights(self) -> int:
        return self.vocab * self.hidden * (1 if self.tied else 2) + self.layers * self.layer_weights

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "Shape | None":
        """From a config.json; None for shapes that this does not describe."""
        try:
            heads = int(config["num_attention_heads"])
            if config.get("num_experts") or config.get("num_local_experts"):
                return None
            return cls(
                int(config["vocab_size"]),
                int(config["hidden_size"]),
                int(config["num_hidden_layers"]),
                int(config["intermediate_size"]),
                heads,
                int(config.get("num_key_value_heads") or heads),
                int(config.get("head_dim") or config["hidden_size"] // heads),
                bool(config.get("tie_word_embeddings", False)),
            )
        except (KeyError, TypeError, ValueError):
            return None


def shape_of_new(model: NewModel) -> Shape | None:
    return Shape.of({**model.shape.model_dump(), "vocab_size": len(model.tokenizer.words)})


def shape_of_folder(folder: Path) -> Shape | None:
    """None where the folder has no config.json, or one that this does not describe."""
    try:
        return Shape.of(json.loads((folder / "config.json").read_text()))
    except (OSError, ValueError, AttributeError):
        return None


@dataclass(frozen=True)
class Memory:
    """Bytes. What stays, and on top of it the largest of what comes and goes."""

    process: float
    weights: float
    optimizer: float  # masters and moments
    others: float  # teachers, references
    activations: float
    backward: float  # gradients and logits
    update: float  # gradients as the optimizer reads them
    rollout: float  # keys and values

    @property
    def peak(self) -> float:
        stays = self.process + self.weights + self.optimizer + self.others
        return stays + max(self.activations + self.backward, self.update, self.rollout)


def training_memory(shape: Shape, config: Training, resources: Resources, *, roles: Sequence[str], gpu: bool) -> Memory:
    """`roles` of the stage's inputs. Of lengths and batches the most that the settings allow.

    - weights w P; optimizer 8 P, and 4 P more for the masters of bfloat16 weights;
    - activations: w T L (8 D + 4 I + 4 H h), which is what transformers' layers keep, or, with gradient_checkpointing,
      w T (L D + one layer's);
    - backward: gradients w P; four [C, V] buffers and the output matrix's gradient, in float32;
    - update: gradients 4 P;
    - rollout: keys and values of a batch's completions, 2 w L K h a token;
    - LoRA: weights w (P + adapted), and optimizer and gradients of A and B alone, in float32.
    """
    train = config.train
    w = 2 if train.precision == "bfloat16" else 4
    weights = trained = shape.weights
    moments, head = 8 + (4 if w == 2 else 0), 4 * shape.vocab * shape.hidden
    if train.lora is not None:
        weights += shape.layers * shape.layer_weights
        trained, moments, head = train.lora.rank * shape.layers * shape.sides, 8 + 4, 0
    tokens, rows = _tokens(config, resources)
    layer = 8 * shape.hidden + 4 * shape.mlp + 4 * shape.heads * shape.head
    kept = shape.layers * shape.hidden + layer if resources.gradient_checkpointing else shape.layers * layer
    logits = _LOGIT_BUFFERS * min(4 * tokens * shape.vocab, _LOGITS) + head
    return Memory(
        process=0 if gpu else PROCESS,
        weights=w * weights,
        optimizer=moments * trained,
        others=_others(shape, config, resources, roles, w),
        activations=w * tokens * kept,
        backward=w * trained + logits,
        update=4 * trained,
        rollout=2 * w * shape.layers * shape.key_heads * shape.head * rows,
    )


def _tokens(config: Training, resources: Resources) -> tuple[int, int]:
    """Tokens of a micro-batch, those of shared prompts once, and of a batch of rollouts."""
    batch, budget = config.train.global_batch_size, resources.micro_batch_tokens
    if isinstance(config, SftSettings):
        return min(batch * config.max_tokens, max(budget, config.max_tokens)), 0
    rollout, size = config.rollout, config.rollout.group_size
    longest = rollout.max_prompt_tokens + rollout.max_completion_tokens
    most = min(batch * longest, max(budget, longest))
    if size * longest <= budget:
        most = round(most * (rollout.max_prompt_tokens / size + rollout.max_completion_tokens) / longest)
    return most, rollout.prompts * size * longest


def _others(shape: Shape, config: Training, resources: Resources, roles: Sequence[str], w: int) -> int:
    """References and budgets are in float32; of teachers as many as may be in memory at once."""
    if not isinstance(config, OpdSettings):
        return 4 * shape.weights * sum(role in ("reference", "budget") for role in roles)
    held = min(resources.resident_teachers, sum(role == "teachers" for role in roles))
    return w * held * (shape.vocab * shape.hidden if resources.teacher_states == "cached" else shape.weights)
