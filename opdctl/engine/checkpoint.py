"""Policies and tokenizers from settings or from a Hugging Face folder, and back to one."""

import math
import shutil
from pathlib import Path

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig, Qwen3Config

from opdctl.engine.policy import Policy
from opdctl.engine.qwen3 import Qwen3Policy, exact_for, rotary_table
from opdctl.engine.tokenizer import Tokenizer as Tokenizer
from opdctl.engine.tokenizer import encode as encode
from opdctl.engine.tokenizer import encode_batch as encode_batch
from opdctl.engine.tokenizer import load_tokenizer as load_tokenizer
from opdctl.engine.tokenizer import word_tokenizer
from opdctl.engine.weights import NO_NETWORK, check_finite, check_names, no_network, read_weights
from opdctl.errors import OpdctlError
from opdctl.settings import NewModel
from opdctl.weight_files import weight_files

CONFIG = "config.json"
TIED = "lm_head.weight"  # of a tied model: some folders hold it as well


def new_policy(new_model: NewModel, seed: int) -> tuple[Qwen3Policy, Tokenizer]:
    """A Qwen3 network at random and its word tokenizer; the same seed gives the same weights.

    Standard deviations: 0.02 for embeddings and an untied output matrix, 1/sqrt(fan-in) for the others, of which
    those that write into the residual stream are divided by sqrt(2 * layers) (as in GPT-2).
    """
    words, shape = new_model.tokenizer.words, new_model.shape.model_dump()
    tokenizer = word_tokenizer(words)
    theta = shape.pop("rope_theta")
    config = Qwen3Config(
        **shape,
        vocab_size=len(words),
        rope_parameters={"rope_type": "default", "rope_theta": theta},
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        architectures=["Qwen3ForCausalLM"],
    )
    policy = Qwen3Policy(config, eos_ids=(2,), pad_id=0)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in policy.named_parameters():
            if weight.dim() == 1:
                weight.fill_(1.0)
                continue
            deviation = 0.02 if name.endswith(("embed_tokens.weight", TIED)) else weight.shape[1] ** -0.5
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                deviation /= math.sqrt(2 * config.num_hidden_layers)
            weight.copy_(torch.randn(weight.shape, generator=generator) * deviation)
    return policy, tokenizer


def save_new_model(new_model: NewModel, seed: int, folder: Path) -> None:
    """The folder of a new model, in float32, for those who read models from folders only; left as it is if it is there.
    Whole or not at all."""
    if folder.exists():
        return
    staging = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(staging, ignore_errors=True)
    save_policy(*new_policy(new_model, seed), staging, dtype=torch.float32)
    staging.rename(folder)


def load_policy(path: str | Path, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> Policy:
    """The model of a Hugging Face folder: Qwen3Policy where that is exact, else CausalLMPolicy.

    EOS ids are the union of the tokenizer's, the generation config's and the config's, in this order. The pad id is
    the config's, else the generation config's, else the tokenizer's, else the first EOS id.

    Raises OpdctlError for a folder without config.json or whole safetensors weights, for tensors that are missing,
    unexpected, of another shape or not finite, and for a model that needs code of its own, that reads more than text,
    or that knows no EOS.
    """
    folder = Path(path)
    config = _text_only(load_config(folder), folder)
    weight_files(folder)
    eos_ids, pad_id = _special_ids(folder, config)
    if not exact_for(config):
        # imported here alone: transformers' models take seconds to import, and a Qwen3 recipe needs none
        from opdctl.engine.causal_lm import CausalLMPolicy, load_network

        return CausalLMPolicy(load_network(folder, config, dtype).to(device), eos_ids, pad_id)
    policy = _qwen3(config, eos_ids, pad_id, folder)
    policy.load_state_dict(_checked_weights(folder, policy))
    return policy.to(device=device, dtype=dtype)


def map_policy(path: str | Path, *, like: Policy, dtype: torch.dtype, check: bool = True) -> Policy:
    """The same on the CPU for a model that is read often and not for long: the weights are the file's own pages, where
    its dtype is `dtype`. The special ids are those of `like`, a model of equal vocabulary.

    Raises as `load_policy` does; without `check`, for a folder that it has loaded before, values are not looked at.
    """
    folder = Path(path)
    config = _text_only(load_config(folder), folder)
    if not exact_for(config):
        from opdctl.engine.causal_lm import CausalLMPolicy, load_network

        return CausalLMPolicy(load_network(folder, config, dtype), like.eos_ids, like.pad_id)
    with torch.device("meta"):
        policy = _qwen3(config, like.eos_ids, like.pad_id, folder)
    policy.load_state_dict(_checked_weights(folder, policy, values=check), assign=True)
    policy.turns = rotary_table(config)
    return policy.to(dtype=dtype)


def _qwen3(config: PreTrainedConfig, eos_ids: tuple[int, ...], pad_id: int, folder: Path) -> Qwen3Policy:
    """Not yet with its weights. Raises OpdctlError for a configuration that no network can be made of."""
    try:
        return Qwen3Policy(config, eos_ids, pad_id)
    except NO_NETWORK as error:
        raise no_network(folder, error) from error


def _checked_weights(folder: Path, policy: Qwen3Policy, *, values: bool = True) -> dict[str, Tensor]:
    """All tensors that the policy has, and no others. Raises OpdctlError for what does not fit or is not finite."""
    tensors, config = read_weights(folder), policy.config
    tied = tensors.pop(TIED, None) if config.tie_word_embeddings else None
    check_names(tensors, dict(policy.named_parameters()), folder)
    if not values:
        return tensors
    check_finite(tensors, folder)
    if tied is not None and not torch.equal(tied, tensors["model.embed_tokens.weight"]):
        raise OpdctlError(
            f"{folder}: config.json ties {TIED} to the embeddings, but the weights hold both and they differ",
            hint="set tie_word_embeddings to false in config.json, if the weights are right",
        )
    return tensors


def load_vocabulary(path: str | Path) -> tuple[Tokenizer, tuple[int, ...], int]:
    """(tokenizer, EOS ids, number of logits) of a folder, as `load_policy` gives them, without reading its weights."""
    folder = Path(path)
    config = load_config(folder)
    return load_tokenizer(folder), _special_ids(folder, config)[0], int(config.get_text_config().vocab_size)


def save_policy(policy: Policy, tokenizer: Tokenizer, folder: str | Path, *, dtype: torch.dtype) -> None:
    """Write a folder that AutoModelForCausalLM and AutoTokenizer load. Equal weights give equal bytes."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    state = {name: tensor.to("cpu", dtype).contiguous() for name, tensor in policy.state_dict().items()}
    policy.save_network(state, folder)
    _save_beside(policy.config, policy.eos_ids, policy.pad_id, tokenizer, folder, dtype)


def save_surroundings(source: Path, folder: Path, dtype: torch.dtype) -> None:
    """All of a folder but the weights, written as `save_policy` writes it, for weights of `dtype`."""
    config = load_config(source)
    _save_beside(config, *_special_ids(source, config), load_tokenizer(source), folder, dtype)


def _save_beside(
    config: PreTrainedConfig,
    eos_ids: tuple[int, ...],
    pad_id: int,
    tokenizer: Tokenizer,
    folder: Path,
    dtype: torch.dtype,
) -> None:
    config = type(config).from_dict(config.to_dict())
    config.dtype = dtype
    config.save_pretrained(folder)
    eos = list(eos_ids) if len(eos_ids) > 1 else eos_ids[0]
    generation = GenerationConfig(eos_token_id=eos, pad_token_id=pad_id, bos_token_id=config.bos_token_id)
    generation.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def load_config(folder: Path) -> PreTrainedConfig:
    """Of a folder. Raises OpdctlError where it has none that transformers reads without code from the folder."""
    if not (folder / CONFIG).is_file():
        raise OpdctlError(
            f"{folder}: no {CONFIG}" if folder.is_dir() else f"{folder}: no such folder",
            hint="point to a folder in Hugging Face format: config.json, model.safetensors, tokenizer files",
        )
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except StrictDataclassError as error:
        raise OpdctlError(
            f"{folder / CONFIG}: {' '.join(str(error).split())}", hint="correct the value, or copy the file again"
        ) from None
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        raise OpdctlError(
            f"{folder / CONFIG}: transformers cannot read it without code from the folder, which opdctl never runs: "
            f"{error}",
            hint="use a model of an architecture that transformers has itself",
        ) from None
    return config


def _text_only(config: PreTrainedConfig, folder: Path) -> PreTrainedConfig:
    if not hasattr(config, "vocab_size"):
        raise OpdctlError(
            f"{folder}: {type(config).__name__} describes a model of text and more, whose text has a configuration of "
            "its own: the embedded engine reads text alone",
            hint="backend: verl trains such models, and backend: vllm evaluates them",
        )
    return config


def _special_ids(folder: Path, config: PreTrainedConfig) -> tuple[tuple[int, ...], int]:
    """EOS ids and pad id, see `load_policy`; of a model of text and more those of its text."""
    config = config.get_text_config()
    has_generation = (folder / "generation_config.json").is_file()
    generation = _generation(folder) if has_generation else None
    tokenizer = load_tokenizer(folder)
    sources = tokenizer.eos_token_id, getattr(generation, "eos_token_id", None), config.eos_token_id
    eos_ids = tuple(dict.fromkeys(token for source in sources for token in _as_list(source)))
    if not eos_ids:
        raise OpdctlError(
            f"{folder}: neither tokenizer, generation_config.json nor config.json names an end-of-sequence token",
            hint='add "eos_token_id" to generation_config.json: without one no completion ever ends',
        )
    pads = config.pad_token_id, getattr(generation, "pad_token_id", None), tokenizer.pad_token_id, eos_ids[0]
    pad_id = next(token for token in pads if token is not None)
    outside = [token for token in (*eos_ids, pad_id) if not 0 <= token < config.vocab_size]
    if outside:
        raise OpdctlError(
            f"{folder}: special token ids {outside} are outside the vocabulary of {config.vocab_size} tokens",
            hint="correct eos_token_id and pad_token_id in config.json and generation_config.json",
        )
    return eos_ids, int(pad_id)


def _generation(folder: Path) -> GenerationConfig:
    try:
        return GenerationConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, StrictDataclassError) as error:
        raise OpdctlError(
            f"{folder / 'generation_config.json'}: transformers cannot read it: {error}",
            hint="correct the value, or copy the file again",
        ) from None


def _as_list(ids: int | list[int] | None) -> list[int]:
    return [] if ids is None else [ids] if isinstance(ids, int) else list(ids)
