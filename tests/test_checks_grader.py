"""Graders and generated tasks that contradict their stage are told before launch, by key."""

import pytest
from recipes import recipe, tree

from opdctl.errors import ConfigError
from opdctl.pipeline import expand
from opdctl.templates import marker

RUBRIC = {
    "tasks": ["${each.domain}"],
    "mode": "rubric",
    "by": "actor",
    "template": "{prompt} {completion}",
    "verdicts": {"yes": 1.0, "no": 0.0},
    "max_tokens": 2,
}
EXAM = RUBRIC | {"tasks": ["math", "code"]}
PAIRS = EXAM | {"mode": "pairwise", "template": "{first} {second}"}
SERVER = {"by": "endpoint", "endpoint": {"url": "http://127.0.0.1:8000/v1", "model": "m"}}
RL, EVAL = "stages.max.config.grader", "stages.eval.config.grader"
GROUP = "stages.eval.config.rollout.group_size"
JUDGE = {f"stages.{stage}.inputs.grader": "stage:sft" for stage in ("max", "eval")}
GRADE = {"task": "grade", "chain": {"task": "chain", "domain": "math"}}


def at(url):
    return RUBRIC | {"by": "endpoint", "endpoint": {"url": url, "model": "m"}}


BAD = [
    ({RL: RUBRIC | {"tasks": ["maths"]}}, RL + ".tasks", "the stage reads no task 'maths' (did you mean 'math'?"),
    ({EVAL: EXAM | {"by": "model"}}, "stages.eval.inputs.grader", "required, and not set: config.grader.by is model"),
    ({EVAL: EXAM} | JUDGE, "stages.eval.inputs.grader", "would not be read: config.grader.by is actor"),
    (JUDGE, "stages.max.inputs.grader", "would not be read: config.grader is not set"),
    (
        {EVAL: PAIRS, "stages.eval.config.rollout.group_size": 1},
        EVAL + ".mode",
        "pairwise compares the completions of a group",
    ),
    ({RL: RUBRIC | {"template": "{completion!z}"}}, RL, "template: {completion} is filled in as it is"),
    ({RL: RUBRIC | {"template": "{completion:d}"}}, RL, "template: {completion} is filled in as it is"),
    ({RL: RUBRIC | {"by": "endpoint"}}, RL, "by: endpoint needs `endpoint`"),
    ({RL: at("ftp://127.0.0.1/v1")}, RL + ".endpoint", "url: must begin with http:// or https://"),
    ({RL: at("http://me:pass@127.0.0.1/v1")}, RL + ".endpoint", "url: has a user or a password in it"),
    ({RL: RUBRIC | {"endpoint": SERVER["endpoint"]}}, RL, "by: actor has no use for `endpoint`"),
    ({EVAL: EXAM, "stages.eval.backend": "vllm"}, EVAL + ".by", "actor: vLLM is loaded for the models"),
    ({RL: RUBRIC | SERVER, "stages.max.backend": "verl"}, RL, "verl's rewards come from the tasks'"),
    (
        {"tasks.code": {**GRADE, "chain": {**GRADE["chain"], "strides": {"max": 1}}}},
        "stages.sft.config.data.efforts",
        "tasks.code.chain.strides has none for effort 'low'",
    ),
    ({"tasks.code": {**GRADE, "candidates": 3}}, "tasks.code.candidates", "unknown key"),
]


def filled(changes):
    """`${each.domain}` as the recipe's tree writes it."""
    text = {"${each.domain}": marker("domain")}

    def walk(value):
        if isinstance(value, dict):
            return {key: walk(item) for key, item in value.items()}
        if isinstance(value, list):
            return [walk(item) for item in value]
        return text.get(value, value) if isinstance(value, str) else value

    return walk(changes)


def test_a_password_in_a_url_is_not_repeated():
    with pytest.raises(ConfigError) as caught:
        expand(tree(filled({RL: at("http://me:s3cret@127.0.0.1/v1")})))
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(("changes", "key", "text"), BAD, ids=[f"{key}: {text}"[:80] for _, key, text in BAD])
def test_a_contradiction_is_told_by_its_key(changes, key, text):
    with pytest.raises(ConfigError) as caught:
        expand(tree(filled(changes)))
    bare = [line.replace("[domain=math]", "").replace("[domain=code]", "") for line in caught.value.problems]
    assert any(line.startswith(f"{key}: {text}") for line in bare), bare


@pytest.mark.parametrize(
    "changes",
    [
        {RL: RUBRIC, EVAL: EXAM},
        {RL: RUBRIC | {"by": "model"}, EVAL: EXAM | {"by": "model"}} | JUDGE,
        {RL: RUBRIC | SERVER, EVAL: EXAM | SERVER},
        {EVAL: PAIRS},
        {EVAL: EXAM | SERVER, "stages.eval.backend": "vllm", "machine": {"slots": 1, "cpus": 2, "gpus": 1}},
        {"tasks.code": GRADE},
        {"tasks.code": {"task": "facts"}},
        {"tasks.code": {**GRADE, "task": "fuse", "candidates": 6}},
    ],
)
def test_what_agrees_is_taken(changes):
    recipe(filled(changes))


def test_another_judge_is_another_stage():
    """Its model is part of the stage's identity, as the model that is trained is."""
    by_model = {RL: RUBRIC | {"by": "model"}}
    judges = [recipe(filled(by_model | {"stages.max.inputs.grader": ref})) for ref in ("stage:sft", "model:")]
    first, second = (pipeline.stages["max[domain=math]"] for pipeline in judges)
    assert {given.role for given in first.inputs} == {"init", "grader"}
    assert first.inputs != second.inputs
