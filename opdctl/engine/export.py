"""A checkpoint as a folder for others, verified by generating with it."""

import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from opdctl.engine.checkpoint import load_policy
from opdctl.engine.policy import Policy
from opdctl.engine.sampling import sample
from opdctl.engine.tokenizer import load_tokenizer
from opdctl.errors import OpdctlError
from opdctl.records import disk_errors

PROMPTS = 4
NEW_TOKENS = 16
NO_TOKEN = -1


def export_model(source: Path, names: Iterable[str], target: Path) -> int:
    """Copy the files `names` of the folder `source` to the new folder `target`; returns how many tokens were compared.

    The copy must load in transformers and generate the same greedy tokens as the engine does from the source, in
    float32 and past any end of sequence. Raises OpdctlError where it does not, and leaves no folder then.
    """
    if target.exists():
        raise OpdctlError(f"{target} exists already", hint="name a new folder: nothing is overwritten")
    staging = target.with_name(f".{target.name}.part")
    shutil.rmtree(staging, ignore_errors=True)
    try:
        with _creating(target), disk_errors(target):
            staging.mkdir(parents=True)
            for name in names:
                (staging / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source / name, staging / name)
        compared = _compare(load_policy(source), staging)
        os.replace(staging, target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return compared


@contextmanager
def _creating(target: Path) -> Iterator[None]:
    """What the disk refuses for a reason other than space and permission, a file in the path say."""
    try:
        yield
    except OSError as error:
        raise OpdctlError(f"cannot write {target}: {error.strerror}", hint="choose another folder") from error


def _compare(policy: Policy, folder: Path) -> int:
    prompts = _prompts(policy, len(load_tokenizer(folder)))
    policy.eos_ids = (NO_TOKEN,)  # a short answer would compare little
    ours = sample(
        policy,
        prompts,
        group_size=1,
        max_completion_tokens=NEW_TOKENS,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        seed=0,
        keys=range(len(prompts)),
        greedy=True,
    ).completions
    theirs = _generate(folder, prompts)
    for prompt, own, other in zip(prompts, ours, theirs, strict=True):
        if own != other:
            raise OpdctlError(
                f"{folder.name}: transformers continues {prompt} with {other}, the engine with {own}",
                hint="the weights or the config do not say the same to both; this folder was not exported",
            )
    return sum(map(len, ours))


def _prompts(policy: Policy, words: int) -> list[list[int]]:
    """Token ids at random, the same for every checkpoint of a vocabulary; of different lengths."""
    generator = torch.Generator().manual_seed(0)
    usable = [token for token in range(min(words, policy.vocab_size)) if token not in {policy.pad_id, *policy.eos_ids}]
    picks = [torch.randint(len(usable), (3 + 2 * at,), generator=generator).tolist() for at in range(PROMPTS)]
    return [[usable[pick] for pick in row] for row in picks]


@torch.no_grad()
def _generate(folder: Path, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Prompt by prompt, so that no padding can be at fault."""
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    model.generation_config.eos_token_id = None
    completions = []
    for prompt in prompts:
        ids_BT = torch.tensor([list(prompt)])
        out_BT = model.generate(
            ids_BT,
            attention_mask=torch.ones_like(ids_BT),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
        )
        completions.append(out_BT[0, len(prompt) :].tolist())
    return completions
