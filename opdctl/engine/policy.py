"""What the stages ask of a language model: hidden states of a batch, the output matrix, cached generation.

The output matrix is handed out instead of logits so that losses can go through the vocabulary in chunks.

Legend: B rows, P prompt columns (padded at the left), T columns, N completion tokens, D hidden size, V vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence as Items
from pathlib import Path
from typing import Protocol

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedConfig

from opdctl.engine.batch import Sequence, TokenBatch, collate, micro_batches
from opdctl.engine.vocab import token_logprobs
from opdctl.errors import OpdctlError
from opdctl.weight_files import SINGLE


class Cache(Protocol):
    """Keys and values of the tokens that a policy has seen, one row a sequence."""

    def keep(self, rows: Tensor) -> None:
        """In place: the rows of these indices, in their order; one may be there several times."""


class Policy(nn.Module, ABC):
    """A causal language model whose logits are `hidden @ head().T`. Never drops out, in training neither: the
    distribution that is trained has to be the one that was sampled.

    `config` is the Hugging Face configuration that `save_policy` writes.
    """

    shares_prefixes: bool  # may a TokenBatch carry a tree mask?

    def __init__(self, config: PreTrainedConfig, eos_ids: tuple[int, ...], pad_id: int) -> None:
        super().__init__()
        self.config = config
        self.eos_ids = eos_ids  # the first is the one to teach; generation stops at any
        self.pad_id = pad_id

    @property
    def vocab_size(self) -> int:
        return self.head().shape[0]

    @property
    def device(self) -> torch.device:
        return self.head().device

    @property
    def max_positions(self) -> int | None:
        """Tokens of prompt and completion that the network can take in; None: no limit of its own."""
        limit = getattr(self.config, "max_position_embeddings", None)
        return None if limit is None else int(limit)

    def batch(self, sequences: Items[Sequence]) -> TokenBatch:
        """The sequences as this model reads them."""
        return collate(sequences, share_prefixes=self.shares_prefixes, pad_id=self.pad_id, device=self.device)

    def check_length(self, tokens: int) -> None:
        """Raises OpdctlError when a sequence has more tokens than the network has positions."""
        if self.max_positions is not None and tokens > self.max_positions:
            raise OpdctlError(
                f"a sequence of {tokens} tokens does not fit the model: max_position_embeddings is "
                f"{self.max_positions}",
                hint="lower max_prompt_tokens, max_completion_tokens or max_tokens, or use a model with more positions",
            )

    def save_network(self, state: dict[str, Tensor], folder: Path) -> None:
        """Write these tensors of `state_dict()` (and whatever else the architecture saves) to the folder."""
        save_file(state, folder / SINGLE, metadata={"format": "pt"})

    @abstractmethod
    def linear_layers(self) -> dict[str, Tensor]:
        """Matrices [out, in] of the network's linear layers, the output matrix left out, by the layer's name in
        transformers' model."""

    @abstractmethod
    def checkpoint_activations(self) -> None:
        """From now on `hidden` keeps a layer's input alone, and computes the layer again for the backward pass."""

    @abstractmethod
    def head(self) -> Tensor:
        """The output matrix [V, D]."""

    @abstractmethod
    def hidden(self, batch: TokenBatch) -> Tensor:
        """Hidden states [N, D], after the last norm, that predict the batch's completion tokens."""

    @abstractmethod
    def prefill(self, prompts_BP: Tensor, lengths_B: Tensor, max_new: int) -> tuple[Tensor, Cache]:
        """Read prompts padded at the left; returns the hidden states [B, D] that predict the first new token, and a
        cache with room for `max_new` tokens. Without gradient."""

    @abstractmethod
    def decode(self, tokens_B: Tensor, cache: Cache) -> Tensor:
        """Append one token to every row of the cache; returns the hidden states [B, D] that predict the next one."""


@torch.no_grad()
def completion_logprobs(
    policy: Policy, sequences: Items[Sequence], *, micro_batch_tokens: int, temperature: float = 1.0
) -> list[Tensor]:
    """Log-probabilities of each sequence's targets, a tensor a sequence."""
    found: list[Tensor] = []
    for part in micro_batches(sequences, micro_batch_tokens):
        chosen = [sequences[i] for i in part]
        batch = policy.batch(chosen)
        hidden_ND, head_VD = policy.hidden(batch), policy.head()
        logprobs_N, _ = token_logprobs(hidden_ND, head_VD, batch.targets_N, temperature=temperature)
        found += logprobs_N.split([sequence.counted for sequence in chosen])
    return found
