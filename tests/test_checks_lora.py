"""train.lora where it could not be heeded: refused by key."""

import pytest
from recipes import recipe, tree

from opdctl.errors import ConfigError
from opdctl.pipeline import expand

LORA = {"rank": 4, "alpha": 8.0}
M, F = "stages.max.config.train.lora", "stages.fuse.config.train.lora"
STRETCH = {"steps": [1], "scales": [2.0], "prompts": 4}
VERL = {"stages.max.backend": "verl", "machine": {"slots": 1, "cpus": 2, "gpus": 8}}

BAD = [
    ({"stages.sft.config.train.lora": LORA}, "sft.config.train.lora", "this stage begins with a new one"),
    ({F: LORA, "stages.fuse.config.extrapolation": STRETCH}, "fuse.config.extrapolation", "leave one of both out"),
    (VERL | {M: LORA}, "max.config.train.lora", "backend: embedded merges"),
]


@pytest.mark.parametrize(("changes", "key", "text"), BAD, ids=[key for _, key, _ in BAD])
def test_what_lora_cannot_do_is_refused_with_the_reason(changes, key, text):
    with pytest.raises(ConfigError) as refused:
        expand(tree(changes))
    problems = [problem.replace("max[domain=math]", "max") for problem in refused.value.problems]
    assert any(problem.startswith(f"stages.{key}: ") and text in problem for problem in problems), problems


def test_adapters_on_a_trained_model_are_taken():
    assert recipe({M: LORA, F: LORA}).stages
