"""Is a teacher one that can teach? Asked of its files before verl starts, which loads whatever it is given.

A model that was never trained, or is the student itself, gives a loss that falls and a student that learns nothing.
"""

import filecmp
import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path

from opdctl.backends.contract import InputSpec
from opdctl.errors import StageRefused

PROBED_BYTES = 256 * 2**20  # weights up to this size are loaded and asked; of larger ones only the norms are read
PROBED_TOKENS = 16_384  # of one teacher's texts: a forward pass of a second or two
KNOWN = 0.9  # this quantile of a text's log-probabilities ...
BLIND = -0.88  # ... is above BLIND * ln V if the model knows anything: without training all are close to -ln V


def check_teachers(teachers: Sequence[InputSpec], student: str, texts: Mapping[int, Sequence[Sequence[int]]]) -> None:
    """`student` is a folder, empty for a new model; `texts` are token ids of right answers with their prompts, by
    the number of the teacher that they are routed to. Raises StageRefused naming every teacher that cannot teach.
    """
    problems = []
    for number, teacher in enumerate(teachers):
        if student and same_weights(Path(student), Path(teacher.path)):
            problems.append(f"teacher {teacher.label} has the student's own weights ({teacher.path})")
        elif untrained(Path(teacher.path), texts.get(number, ())):
            problems.append(
                f"teacher {teacher.label} knows nothing of its own rows: its log-probabilities are those of random "
                f"weights, near -ln V ({teacher.path})"
            )
    if problems:
        raise StageRefused("\n".join(problems), hint="correct the stage's `teachers`: name a trained checkpoint")


def same_weights(student: Path, teacher: Path) -> bool:
    """Whether the weight files are equal byte by byte. Files that differ are read up to the first difference."""
    from opdctl.engine.weights import weight_files

    own, other = weight_files(student), weight_files(teacher)
    return [path.name for path in own] == [path.name for path in other] and all(
        filecmp.cmp(a, b, shallow=False) for a, b in zip(own, other, strict=True)
    )


def untrained(folder: Path, texts: Sequence[Sequence[int]]) -> bool:
    """Whether a model's weights are still random.

    A small one scores `texts`, on the CPU: a GPU's memory is to be empty when verl starts. A large one is judged by
    its norms, which every architecture begins as constants and no training leaves so.
    """
    from opdctl.engine.weights import weight_files

    if sum(path.stat().st_size for path in weight_files(folder)) > PROBED_BYTES:
        return _constant_norms(folder)
    return _blind(folder, texts)


def _constant_norms(folder: Path) -> bool:
    from safetensors import safe_open

    from opdctl.engine.weights import weight_files

    found = False
    for path in weight_files(folder):
        with safe_open(path, framework="pt") as tensors:
            for name in (name for name in tensors.keys() if name.endswith("norm.weight")):  # noqa: SIM118  # no dict
                values = tensors.get_tensor(name)
                if float(values.max()) != float(values.min()):
                    return False
                found = True
    return found


def _blind(folder: Path, texts: Sequence[Sequence[int]]) -> bool:
    import torch

    from opdctl.engine.batch import Sequence as Tokens
    from opdctl.engine.batch import collate
    from opdctl.engine.checkpoint import load_policy
    from opdctl.engine.vocab import token_logprobs

    policy = load_policy(folder)
    limit = min(policy.max_positions or PROBED_TOKENS, PROBED_TOKENS)
    fitting = [ids for ids in texts if 1 < len(ids) <= limit]
    total = list(accumulate(map(len, fitting)))
    scored = [
        Tokens((ids[0],), tuple(ids[1:])) for ids, so_far in zip(fitting, total, strict=True) if so_far <= PROBED_TOKENS
    ]
    if not scored:
        return False
    batch = collate(scored, share_prefixes=False, pad_id=policy.pad_id)
    with torch.no_grad():
        logprobs_N, _ = token_logprobs(policy.hidden(batch), policy.head(), batch.targets_N)
    before_N = torch.tensor([token for tokens in scored for token in (*tokens.prompt, *tokens.completion[:-1])])
    # random weights with tied embeddings foresee a repetition: what they read is still in what they say
    told_N = logprobs_N[before_N != batch.targets_N]
    return len(told_N) > 0 and float(told_N.float().quantile(KNOWN)) < BLIND * math.log(policy.vocab_size)
