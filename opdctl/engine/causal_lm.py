"""Any causal language model that `transformers` loads by itself, as a Policy.

Legend: B rows, P prompt columns (padded at the left), T columns seen so far, N wanted positions, D hidden size,
V vocabulary.
"""

import inspect
from collections.abc import Callable
from collections.abc import Sequence as Items
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import logging

from opdctl.engine.batch import Sequence, TokenBatch, collate
from opdctl.engine.policy import Cache, Policy
from opdctl.engine.weights import NO_NETWORK, check_finite, no_network
from opdctl.errors import OpdctlError, StageRefused
from opdctl.weight_files import computable_files, some

_TRIED = 14  # tokens of the longest sequence that is tried when a model is loaded


class CausalLMCache:
    """A DynamicCache with the attention mask of what it holds, padding at the left."""

    def __init__(self, cache: DynamicCache, mask_BT: Tensor) -> None:
        self.cache = cache
        self.mask_BT = mask_BT  # int64, 0 at padding

    def keep(self, rows: Tensor) -> None:
        self.cache.batch_select_indices(rows)
        self.mask_BT = self.mask_BT[rows]


class CausalLMPolicy(Policy):
    """Refuses, when made, a model that does not keep to the contract of Policy. Whether it shares prefixes is found out
    then, too."""

    def __init__(self, model: PreTrainedModel, eos_ids: tuple[int, ...], pad_id: int) -> None:
        super().__init__(model.config, eos_ids, pad_id)
        self.network = model.eval()
        self.shares_prefixes, self._window = False, _window(model.config)
        self._arguments = frozenset(inspect.signature(self._backbone.forward).parameters)
        self._check()
        self.shares_prefixes = self._reads_trees()

    @property
    def _backbone(self) -> torch.nn.Module:
        backbone: torch.nn.Module = self.network.base_model
        return backbone

    def train(self, mode: bool = True) -> "CausalLMPolicy":
        """Changes nothing: a network in training mode drops out."""
        return self

    def save_network(self, state: dict[str, Tensor], folder: Path) -> None:
        prefix = "network."
        named = {name.removeprefix(prefix): tensor for name, tensor in state.items()}
        self.network.save_pretrained(folder, state_dict=named)

    def linear_layers(self) -> dict[str, Tensor]:
        output = self.network.get_output_embeddings()
        return {
            name: module.weight
            for name, module in self.network.named_modules()
            if isinstance(module, torch.nn.Linear) and module is not output
        }

    def checkpoint_activations(self) -> None:
        layers = [module for module in self.network.modules() if isinstance(module, GradientCheckpointingLayer)]
        if not layers:
            raise StageRefused(
                f"resources.gradient_checkpointing: {type(self.network).__name__} has no layers that can be recomputed",
                hint="leave it out, and lower resources.micro_batch_tokens",
            )
        for layer in layers:
            # transformers' own way needs training mode, in which networks drop out
            layer.forward = partial(_recomputed, layer.forward)  # of these layers alone

    def head(self) -> Tensor:
        head: Tensor = self.network.get_output_embeddings().weight
        return head

    def batch(self, sequences: Items[Sequence]) -> TokenBatch:
        longest = max((len(sequence.prompt) + len(sequence.completion) for sequence in sequences), default=0)
        share = self._shares(longest) and self._sharing_pays(sequences)
        return collate(sequences, share_prefixes=share, pad_id=self.pad_id, device=self.device)

    def _sharing_pays(self, sequences: Items[Sequence]) -> bool:
        """Groups in one row read their prompt once, but every query of a branch passes over the other branches: of long
        completions that costs more. Counted: weights a token meets, and numbers of queries and keys that meet."""
        weights = sum(weight.numel() for weight in self._backbone.parameters()) - self.head().numel()
        numbers = 2 * self.config.num_hidden_layers * self.config.hidden_size
        saved = 0
        for group, members in groupby(sequences, key=lambda sequence: sequence.group):
            if group:
                lengths = [(len(sequence.prompt), len(sequence.completion)) for sequence in members]
                row = max(prompt for prompt, _ in lengths) + sum(completion for _, completion in lengths)
                rows = [sum(pair) for pair in lengths]
                saved += weights * (sum(rows) - row) + numbers * (sum(n * n for n in rows) - row * row)
        return saved > 0

    def _shares(self, longest: int) -> bool:
        """Of sequences of at most so many tokens: a tree mask knows no windows."""
        return self.shares_prefixes and (self._window is None or longest <= self._window)

    def hidden(self, batch: TokenBatch) -> Tensor:
        if batch.mask_BTT is None:
            self.check_length(batch.ids_BT.shape[1])
            # Padding is at the right, where no token that counts can see it: no mask, no positions needed.
            return self._states(batch)
        longest = int(batch.positions_BT.max()) + 1
        if not self._shares(longest):
            raise ValueError("this policy reads no tree masks: collate with share_prefixes=policy.shares_prefixes")
        self.check_length(longest)
        return self._states(batch, attention_mask=self._bias(batch.mask_BTT), position_ids=batch.positions_BT)

    def _states(self, batch: TokenBatch, **kwargs: Tensor) -> Tensor:
        hidden_BTD = self._backbone(input_ids=batch.ids_BT, use_cache=False, **kwargs).last_hidden_state
        hidden_ND: Tensor = hidden_BTD[batch.rows_N, batch.cols_N]
        return hidden_ND

    def _bias(self, mask: Tensor) -> Tensor:
        """What attention adds to its scores: 0 where `mask` is true, -inf elsewhere."""
        return torch.zeros_like(mask, dtype=self.head().dtype).masked_fill_(~mask, float("-inf"))

    @torch.no_grad()
    def prefill(self, prompts_BP: Tensor, lengths_B: Tensor, max_new: int) -> tuple[Tensor, Cache]:
        columns = prompts_BP.shape[1]
        self.check_length(columns + max_new)
        seen_BP = torch.arange(columns, device=self.device) >= (columns - lengths_B)[:, None]
        cache = CausalLMCache(DynamicCache(config=self.config), seen_BP.long())
        return self._advance(prompts_BP, cache), cache

    @torch.no_grad()
    def decode(self, tokens_B: Tensor, cache: Cache) -> Tensor:
        assert isinstance(cache, CausalLMCache)
        cache.mask_BT = F.pad(cache.mask_BT, (0, 1), value=1)
        return self._advance(tokens_B[:, None], cache)

    def _advance(self, ids: Tensor, cache: CausalLMCache) -> Tensor:
        """Feed the last columns of the mask; hidden states of the last one."""
        positions = (cache.mask_BT.cumsum(-1) - 1).clamp_min(0)[:, -ids.shape[1] :]
        # The argument's name changed in transformers 5.
        kwargs = {"cache" if "cache" in self._arguments else "past_key_values": cache.cache, "use_cache": True}
        if "position_ids" in self._arguments:
            kwargs["position_ids"] = positions
        mask = cache.mask_BT
        if self.shares_prefixes and self._window is None and ids.shape[1] == 1 and self.device.type == "cpu":
            # a mask that hides nothing: with one, PyTorch reads keys once for all heads that share them (3 to 4 times
            # as fast), without one, once for each
            mask = self._bias(mask[:, None, None].bool())
        hidden: Tensor = self._backbone(input_ids=ids, attention_mask=mask, **kwargs).last_hidden_state
        return hidden[:, -1]

    @torch.no_grad()
    def _check(self) -> None:
        """Three prompts of different lengths: logits are hidden @ head.T, and the cache gives the same states."""
        name = type(self.network).__name__
        head = self.network.get_output_embeddings()
        if not isinstance(head, torch.nn.Linear):
            raise OpdctlError(f"{name} has no linear output layer, which opdctl's losses need")
        ids = [[(7 * i + 3 * j + 1) % self.vocab_size for j in range(length)] for i, length in enumerate((5, 3, 4))]
        batch = collate(
            [Sequence((row[0],), (*row[1:], 0)) for row in ids],
            share_prefixes=False,
            pad_id=self.pad_id,
            device=self.device,
        )
        hidden_ND = self.hidden(batch)
        logits_BTV = self.network(input_ids=batch.ids_BT, use_cache=False).logits
        logits_NV = logits_BTV[batch.rows_N, batch.cols_N]
        if not _close(hidden_ND @ self.head().T, logits_NV):
            raise OpdctlError(
                f"{name}: the logits are not the last hidden states times the output matrix (a bias, scaling or "
                "soft-capping of the logits), and opdctl's losses would train another distribution",
                hint="use a model without final logit bias, scaling or soft-capping",
            )
        width = max(map(len, ids))
        left = torch.tensor([[self.pad_id] * (width - len(row)) + row for row in ids], device=self.device)
        lengths = torch.tensor([len(row) - 1 for row in ids], device=self.device)
        before, cache = self.prefill(left[:, :-1], lengths, 1)
        after = self.decode(left[:, -1], cache)
        ends = torch.tensor([len(row) for row in ids], device=self.device).cumsum(0) - 1
        if not _close(before, hidden_ND[ends - 1]) or not _close(after, hidden_ND[ends]):
            raise OpdctlError(
                f"{name}: generation with a cache and left padding gives other states than a plain forward pass",
                hint="use a model with ordinary key-value attention",
            )

    @torch.no_grad()
    def _reads_trees(self) -> bool:
        """Are states under a tree mask those of plain rows?"""
        if self._window is not None and self._window < _TRIED:
            return False
        if not self.network._supports_attention_backend or "position_ids" not in self._arguments:
            return False
        ids = [[(5 * i + 3 * j + 2) % self.vocab_size for j in range(_TRIED - 7 + i)] for i in range(3)]
        branches = [Sequence((1, 2, 3, 4, row[0]), (*row[1:], 0), group=1) for row in ids]
        plain, tree = (
            collate(branches, share_prefixes=share, pad_id=self.pad_id, device=self.device) for share in (False, True)
        )
        assert tree.mask_BTT is not None
        expected_ND = self._states(plain)

        def error(mask_BTT: Tensor) -> Tensor:
            states_ND = self._states(tree, attention_mask=self._bias(mask_BTT), position_ids=tree.positions_BT)
            return (states_ND - expected_ND).float().abs().mean()

        try:
            # what it is without the tree tells rounding from a mask that is not heeded
            blind = error(torch.ones_like(tree.mask_BTT).tril())
            return bool(error(tree.mask_BTT) < blind * (1e-3 if _wide(expected_ND) else 0.5))
        except (RuntimeError, TypeError, ValueError, IndexError):  # of a model that wants a mask of another shape
            return False


def _window(config: PreTrainedConfig) -> int | None:
    """Tokens up to which every layer sees all that came before; None: however many."""
    names = ("sliding_window", "attention_chunk_size", "window_size")
    windows = [window for name in names if (window := getattr(config, name, None)) is not None]
    return min(windows, default=None)


def _recomputed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


def _wide(a: Tensor) -> bool:
    return a.dtype in (torch.float32, torch.float64)


def _close(a: Tensor, b: Tensor) -> bool:
    """Within rounding of their dtype, by the largest value."""
    tolerance = 1e-4 if _wide(a) else 5e-2
    return bool((a.float() - b.float()).abs().max() <= tolerance * b.float().abs().max().clamp_min(1e-6))


def load_network(folder: Path, config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Any model that transformers has, every tensor of it from the folder's files."""
    logging.disable_progress_bar()
    computable_files(folder)  # whole, and nothing quantized
    try:
        network, info = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # they are reported below, by name
            output_loading_info=True,
        )
    except NO_NETWORK as error:
        raise no_network(folder, error) from error
    problems = {kind: info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys") if info[kind]}
    if problems:
        raise OpdctlError(
            f"{folder}: the weights do not fit config.json: "
            + "; ".join(f"{kind.replace('_', ' ')}: {some(sorted(map(str, keys)))}" for kind, keys in problems.items()),
            hint="config.json and the weights must come from the same model",
        )
    check_finite(dict(network.named_parameters()), folder)
    return network
