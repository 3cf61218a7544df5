"""Tokens per CPU second of our sampler (log-probabilities and entropy included) over `transformers.generate`, which
is measured without them and with them.

Same weights (conf/model/tiny_qwen3.yaml, made at random), one thread, no EOS, so both make the same number of tokens.
Run: python benchmarks/sampler.py
"""

import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import yaml
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from opdctl.engine.checkpoint import load_policy, new_policy, save_policy
from opdctl.engine.policy import Policy
from opdctl.engine.sampling import sample
from opdctl.settings import NewModel

MODEL = Path(__file__).parents[1] / "conf/model/tiny_qwen3.yaml"
PROMPT_TOKENS, NEW_TOKENS, ROUNDS = 11, 32, 15


def cpu_seconds(*actions: Callable[[], object]) -> list[float]:
    """Fastest of `ROUNDS` calls each, taken in turns so that a noisy neighbour meets all of them."""
    best = [float("inf")] * len(actions)
    for _ in range(ROUNDS):
        for i, action in enumerate(actions):
            start = time.process_time()
            action()
            best[i] = min(best[i], time.process_time() - start)
    return best


def open_both(folder: Path) -> tuple[Policy, PreTrainedModel]:
    policy, tokenizer = new_policy(NewModel.model_validate(yaml.safe_load(MODEL.read_text())), seed=0)
    save_policy(policy, tokenizer, folder, dtype=torch.float32)
    ours, theirs = load_policy(folder), AutoModelForCausalLM.from_pretrained(folder).eval()
    ours.eos_ids = (-1,)  # no token has this id: nothing ends early
    theirs.generation_config.eos_token_id = None
    return ours, theirs


def compare(ours: Policy, theirs: PreTrainedModel, prompts: int, group_size: int) -> float:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, ours.vocab_size, (prompts, PROMPT_TOKENS), generator=generator)

    def our_way() -> int:
        rollout = sample(
            ours,
            ids.tolist(),
            group_size=group_size,
            max_completion_tokens=NEW_TOKENS,
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            seed=0,
            keys=range(prompts),
        )
        return len(rollout.sampling_logprobs_N)

    def their_way(*, logprobs: bool = False) -> int:
        out = theirs.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            top_k=0,
            max_new_tokens=NEW_TOKENS,
            num_return_sequences=group_size,
            return_dict_in_generate=True,
            output_logits=logprobs,
        )
        new_BT = out.sequences[:, PROMPT_TOKENS:]
        if logprobs:
            logprobs_BTV = torch.stack(out.logits, 1).log_softmax(-1)
            logprobs_BTV.gather(-1, new_BT[..., None])
            (logprobs_BTV.exp() * logprobs_BTV).sum(-1)
        return new_BT.numel()

    tokens = prompts * group_size * NEW_TOKENS
    assert our_way() == their_way() == tokens
    our_s, their_s, their_full_s = cpu_seconds(our_way, their_way, partial(their_way, logprobs=True))
    print(
        f"{prompts:4d} prompts x {group_size}, tokens per CPU second: opdctl {tokens / our_s:,.0f}; "
        f"transformers {tokens / their_s:,.0f} (ratio {their_s / our_s:.2f}), "
        f"with log-probabilities and entropy {tokens / their_full_s:,.0f} (ratio {their_full_s / our_s:.2f})"
    )
    return their_s / our_s


def main() -> None:
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs = open_both(Path(folder))
        ratios = [compare(ours, theirs, 128, 1), compare(ours, theirs, 16, 8)]
    print(f"smallest ratio {min(ratios):.2f}")


if __name__ == "__main__":
    main()
