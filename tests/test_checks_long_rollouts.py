"""rollout.partial and rollout.journal where nothing would heed them, or where a loss could not: refused by key."""

import pytest
from recipes import recipe, tree

from opdctl.errors import ConfigError
from opdctl.pipeline import expand

M, F = "stages.max.config", "stages.fuse.config"
PARTIAL, JOURNAL = {"done_fraction": 0.8, "max_staleness": 2}, {"every_tokens": 16}
TURNS = {"max_turns": 4, "max_turn_tokens": 8, "max_observation_tokens": 8}
TIS = {"rule": "tis", "cap": 2.0}
WAITS, FUSE_WAITS = {f"{M}.rollout.partial": PARTIAL}, {f"{F}.rollout.partial": PARTIAL}
GRADIENT = {"form": "policy_gradient", "max_advantage": 5.0}
VERL = {"stages.max.backend": "verl", "machine": {"slots": 1, "cpus": 2, "gpus": 8}}

BAD = [
    (WAITS, f"{M}.mismatch", "required by rollout.partial: a completion that waited was drawn by older weights"),
    (WAITS | {f"{M}.mismatch": TIS, f"{M}.rollout.turns": TURNS}, f"{M}.rollout.partial", "an episode cannot wait"),
    (FUSE_WAITS | {f"{F}.loss": GRADIENT}, f"{F}.loss.mismatch", "required by rollout.partial"),
    (FUSE_WAITS | {f"{F}.loss": {"form": "overlap", "k": 4}}, f"{F}.rollout.partial", "overlap is a policy gradient"),
    (FUSE_WAITS | {f"{F}.loss": {"form": "minillm", "discount": 0.9}}, f"{F}.rollout.partial", "minillm is a policy"),
    (FUSE_WAITS | {f"{F}.sampled_by": "teacher"}, f"{F}.rollout.partial", "the student writes nothing"),
    ({"stages.eval.config.rollout.partial": PARTIAL}, "stages.eval.config.rollout.partial", "kind eval has one model"),
    (VERL | WAITS | {f"{M}.mismatch": TIS}, f"{M}.rollout.partial", "resources.verl.mode: async has verl's own"),
    (VERL | {f"{M}.rollout.journal": JOURNAL}, f"{M}.rollout.journal", "verl keeps unfinished completions in memory"),
    (
        {"stages.eval.backend": "vllm", "stages.eval.config.rollout.journal": JOURNAL},
        "stages.eval.config.rollout.journal",
        "vllm keeps unfinished completions in memory, and a killed phase starts them anew: backend: embedded",
    ),
]


@pytest.mark.parametrize(("changes", "key", "text"), BAD, ids=[f"{key}: {text[:20]}" for _, key, text in BAD])
def test_what_would_not_be_heeded_is_refused_with_the_reason(changes, key, text):
    with pytest.raises(ConfigError) as refused:
        expand(tree(changes))
    problems = [problem.replace("max[domain=math]", "max") for problem in refused.value.problems]
    assert any(problem.startswith(f"{key}: ") and text in problem for problem in problems), problems


@pytest.mark.parametrize(
    "changes",
    [
        WAITS | {f"{M}.mismatch": TIS, f"{M}.rollout.journal": JOURNAL},
        WAITS | {f"{M}.mismatch": {"rule": "opsm", "delta": 0.1}, f"{M}.train.global_batch_size": 16},
        FUSE_WAITS,
        FUSE_WAITS | {f"{F}.loss": GRADIENT | {"mismatch": TIS}},
        {"stages.eval.config.rollout.journal": JOURNAL, f"{F}.rollout.journal": JOURNAL},
    ],
)
def test_the_rest_is_taken(changes):
    assert recipe(changes).stages
