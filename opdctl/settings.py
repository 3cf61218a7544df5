"""The reference for every key that a pipeline file may hold: names, types, limits, vetted defaults.

Pure data. A key without a default is one that no paper or library can choose for the user: it must be written in
the pipeline or in the scale. `resources` and `machine` never enter a stage's identity; all other keys do.
"""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from opdctl.fields import NAME_PATTERN, AxisValue, Count, Fraction, Name, NonNegative, Positive, Seed, Settings
from opdctl.merging import MergeSettings
from opdctl.workers import Machine, Resources, Workers

__all__ = ["NAME_PATTERN", "AxisValue", "Machine", "MergeSettings", "Resources", "Settings"]  # and every class below

# ---------------------------------------------------------------------------------------------- model and tasks


class Qwen3Shape(Settings):
    """A Qwen3 network to be initialised at random; names as in the `transformers` configuration."""

    num_hidden_layers: Count
    hidden_size: Count
    intermediate_size: Count
    num_attention_heads: Count
    num_key_value_heads: Count
    head_dim: Count
    rope_theta: Positive = 10_000.0
    max_position_embeddings: Count = 128
    tie_word_embeddings: bool = True
    rms_norm_eps: Positive = 1e-6


class WordTokenizer(Settings):
    """One token a word, words separated by blanks. The first three words are padding, begin and end of sequence."""

    words: Annotated[list[str], Field(min_length=4)]


class NewModel(Settings):
    """A base model made here, from a shape and a seed: what a laptop recipe starts from."""

    source: Literal["new"]
    shape: Qwen3Shape
    tokenizer: WordTokenizer


class FolderModel(Settings):
    """A folder in Hugging Face format with safetensors weights, or `hf:REPO@REVISION`."""

    source: Literal["folder"]
    ref: Annotated[str, Field(pattern=r"^(path|hf):.+$")]


ModelSettings = Annotated[NewModel | FolderModel, Field(discriminator="source")]


class ChainTask(Settings):
    """Generated chains of operations with a verifiable result (`opdctl/tasks/chain.py`)."""

    task: Literal["chain"]
    domain: Literal["math", "code", "if"]
    links: Annotated[int, Field(ge=4, le=64, multiple_of=4)] = 8  # operations in a problem: the difficulty
    strides: dict[str, Count] = {"low": 4, "high": 2, "max": 1}  # write every n-th state at this effort
    held_out: Fraction = 0.1  # share of all problems kept for evaluation, by content hash
    misread: Fraction = 0.65  # demonstrations: chance that a misread operation is applied wrongly
    noise: Fraction = 0.01  # demonstrations: chance that a state is random
    obey: Fraction = 0.9  # demonstrations: chance that the answer's style is the effort asked for


class FileTask(Settings):
    """A user's own rows (`opdctl/tasks/files.py`)."""

    task: Literal["file"] = "file"
    path: str  # JSONL or parquet; relative to the workspace
    prompt: str  # column with the prompt: text, or a list of messages {role, content}
    answer: str  # column with the reference answer
    completion: str | None = None  # column to imitate in SFT; without it SFT imitates `answer`
    verifier: str  # exact, numeric, regex, math_verify or pkg.module:function
    system: str = ""  # system prompt for every row (chat template only)
    template: Literal["raw", "chat"] = "raw"  # chat: the tokenizer's chat template, which must exist
    columns: list[str] = []  # further columns that teachers may be routed by
    held_out: Fraction = 0.1  # share of the rows kept for evaluation, by content hash
    eval_path: str | None = None  # a file of its own for evaluation; then nothing is held out of `path`


def _task_tag(value: Any) -> Any:
    return value.get("task", "file") if isinstance(value, dict) else value.task


_Task = Annotated[ChainTask, Tag("chain")] | Annotated[FileTask, Tag("file")]
TaskSettings = Annotated[_Task, Discriminator(_task_tag)]


class EffortSettings(Settings):
    """How a prompt asks for an effort level. Source: Kimi K3's low / high / max; the wording is undisclosed."""

    by: Literal["control_token", "system_prompt"]
    levels: Annotated[dict[Name, str], Field(min_length=1)]  # level -> token or system prompt, lowest effort first


# ---------------------------------------------------------------------------------------------- parts of a stage


class Optimizer(Settings):
    """AdamW. `wsd` is warm-up, stable, decay over the last `decay_fraction` of the steps (linear)."""

    lr: Positive
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "linear"
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    decay_fraction: Fraction = 0.4
    min_lr_ratio: Fraction = 0.0  # the lr at the end over the peak lr
    betas: Annotated[list[Fraction], Field(min_length=2, max_length=2)] = [0.9, 0.95]
    eps: Positive = 1e-8
    weight_decay: NonNegative = 0.0
    max_grad_norm: Positive = 1.0


class Train(Settings):
    max_steps: Count  # optimizer steps
    global_batch_size: Count  # sequences per optimizer step
    optimizer: Optimizer
    precision: Literal["float32", "bfloat16"] = "float32"  # of the weights while training and as published
    save_every: Count = 20  # optimizer steps between two saves of the recovery state


class Mixture(Settings):
    """Which prompts a stage sees: tasks by their name under `tasks`, each at each effort in turn."""

    tasks: Annotated[list[str], Field(min_length=1)]
    efforts: list[str] = []  # repeats weigh: [low, low, max]; empty: prompts ask for no effort


class Rollout(Settings):
    prompts: Count  # prompts per rollout batch
    group_size: Count = 1  # completions per prompt
    max_prompt_tokens: Count  # a longer prompt is refused, never cut
    max_completion_tokens: Count
    temperature: Positive = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0  # 0: off


class Budget(Settings):
    """b0(x): a per-prompt token budget from the cold-start model's own answers. The estimator is undisclosed."""

    samples: Count  # completions of the cold-start model per prompt
    percentile: Annotated[float, Field(ge=0, le=100)]  # of their lengths, in tokens with EOS
    over: Literal["finished", "correct"]  # `correct` falls back to the finished ones where none is correct
    effort: str  # level at which the cold-start model answers


class EffortBudget(Settings):
    """Kimi K3 section on effort: reward is -1 when T(y) > tau * b0(x), correct or not. Every tau is undisclosed."""

    tau: Positive
    anneal: Literal["gradual", "hard"] = "gradual"
    tau_from: Positive | None = None  # gradual: tau at the start, falling linearly to `tau`; required then
    anneal_fraction: Annotated[float, Field(gt=0, le=1)] = 0.6  # share of the steps that the fall takes
    budget: Budget

    @model_validator(mode="after")
    def _start_is_known(self) -> "EffortBudget":
        if self.anneal == "gradual" and self.tau_from is None:
            raise ValueError("anneal: gradual needs tau_from (for the first rung set it to tau, or anneal: hard)")
        return self


class Kl(Settings):
    """Penalty towards a reference model (input role `reference`): k1, k2, k3 are Schulman's estimators."""

    estimator: Literal["none", "k1", "k2", "k3"] = "none"
    coef: NonNegative = 0.0
    placement: Literal["loss", "reward"] = "loss"

    @model_validator(mode="after")
    def _k1_has_no_gradient(self) -> "Kl":
        if self.estimator == "k1" and self.placement == "loss":
            raise ValueError(
                "estimator: k1 in the loss has a gradient of mean zero; use placement: reward, or estimator: k2 or k3"
            )
        if self.estimator != "none" and self.coef == 0:
            raise ValueError(f"estimator: {self.estimator} with coef 0 does nothing; give coef, or estimator: none")
        return self


class ClipRange(Settings):
    low: Annotated[float, Field(gt=0, le=1)] = 0.2
    high: Positive = 0.2


class DynamicSampling(Settings):
    """DAPO: groups whose rewards are all equal are replaced by groups of further prompts."""

    max_rounds: Count  # rollout batches tried for one step; then it trains on what it has


class Overlong(Settings):
    """Completions cut at `max_completion_tokens`: reward as it is, left out of the loss, or DAPO's soft penalty."""

    handling: Literal["none", "mask", "soft_penalty"] = "none"
    buffer_tokens: Annotated[int, Field(ge=0)] = 0  # soft_penalty: reward falls by 1 over these last tokens

    @model_validator(mode="after")
    def _buffer(self) -> "Overlong":
        if self.handling == "soft_penalty" and self.buffer_tokens == 0:
            raise ValueError("handling: soft_penalty needs buffer_tokens >= 1")
        return self


class PolicyGradientOpd(Settings):
    """Sampled-token form, recipes: MOPD paper, Kimi K3 eq. 15."""

    form: Literal["policy_gradient"]
    max_advantage: Positive  # clip of the log-ratio, +-; undisclosed for K3, 5 in the MOPD paper
    clip: ClipRange = ClipRange()  # ratio clip; acts only with several optimizer steps per rollout batch


class TopKOpd(Settings):
    """Reverse KL on the teacher's top-k. `rest`: what stands for the other tokens (correction: + C_k; lumped: one)."""

    form: Literal["topk"]
    k: Count
    rest: Literal["correction", "lumped_tail"] = "correction"


class FullVocabOpd(Settings):
    """Exact reverse KL over the vocabulary, in chunks of tokens."""

    form: Literal["full_vocab"]


OpdLoss = Annotated[PolicyGradientOpd | TopKOpd | FullVocabOpd, Field(discriminator="form")]


class EvalBudget(Settings):
    """Within-budget accuracy: correct, finished and T(y) <= tau[effort] * b0(x)."""

    tau: dict[str, Positive]
    budget: Budget


# ---------------------------------------------------------------------------------------------- settings per kind


class SftSettings(Settings):
    data: Mixture  # of the tasks' own demonstrations, or of what the stages of the input role `data` sampled
    train: Train
    max_tokens: Count = 4096  # prompt and completion; a longer example is refused, never cut


class RlvrSettings(Settings):
    data: Mixture
    rollout: Rollout
    train: Train
    advantage: Literal["mean", "mean_std", "leave_one_out"] = "mean_std"
    clip: ClipRange = ClipRange()
    aggregation: Literal["sequence_mean", "token_mean", "constant"] = "token_mean"
    kl: Kl = Kl()
    dynamic_sampling: DynamicSampling | None = None
    overlong: Overlong = Overlong()
    effort: EffortBudget | None = None
    unfinished_reward: float = 0.0  # reward of a completion without EOS


class OpdSettings(Settings):
    data: Mixture
    rollout: Rollout
    train: Train
    loss: OpdLoss
    route_by: Annotated[list[str], Field(min_length=1)]  # columns of a row that choose its teacher
    default_teacher: str | None = None  # stage address of the teacher for rows without a route; else refused
    aggregation: Literal["sequence_mean", "token_mean"] = "sequence_mean"  # 1/|y| per sequence, or over all tokens
    health_topk: Count = 16  # of the overlap metrics


class EvalSettings(Settings):
    data: Mixture
    rollout: Rollout  # `prompts`: per task; `group_size`: samples per prompt
    pass_k: list[Count] = [1]
    within: EvalBudget | None = None
    confidence: Annotated[float, Field(gt=0, lt=1)] = 0.95
    seed: Seed = 99  # of the held-out prompts: the same for every seed of the recipe


class SampleSettings(Settings):
    """A model's answers to training prompts as demonstrations for SFT stages (their input role `data`)."""

    data: Mixture
    rollout: Rollout  # `prompts`: per task and effort; `group_size`: tries per prompt
    keep: Literal["correct", "all"] = "correct"  # of the answers that end; those cut short are never kept
    per_prompt: Count = 1  # answers kept of a prompt at most, the first ones
    save_every: Count = 256  # prompts between two saves of the recovery state


# ---------------------------------------------------------------------------------------------- stages and pipeline


class WeightedInput(Settings):
    """A teacher, or an evaluated or merged model, with more than a reference."""

    ref: str
    route: dict[str, str] = {}  # values of the `route_by` columns; from the stage's labels where absent
    weight: Positive = 1.0
    label: str = ""


class Foreach(Settings):
    """`foreach: {AXIS: values, ...}` is short for `product`. With both: every zipped row for each of the product."""

    product: dict[Name, list[AxisValue]] = {}
    zip: dict[Name, list[AxisValue]] = {}


def _input_tag(value: Any) -> str:
    return "list" if isinstance(value, list) else "model" if isinstance(value, dict | WeightedInput) else "reference"


_One = Annotated[str, Tag("reference")] | Annotated[WeightedInput, Tag("model")]
_Several = Annotated[list[Annotated[_One, Discriminator(_input_tag)]], Tag("list")]
InputValue = Annotated[_One | _Several, Discriminator(_input_tag)]


class _Stage(Settings):
    backend: Literal["embedded", "verl", "vllm"]
    inputs: dict[str, InputValue]  # role -> reference or references
    labels: dict[Name, str] = {}  # with the fan-out's values: routing, tags and tables
    resources: Resources = Resources()
    verl: dict[str, Any] = {}  # backend verl: raw overrides, verl's own key -> value; keys that opdctl sets are refused
    seed: Seed | None = None  # the pipeline's seed where absent
    tasks: dict[str, TaskSettings] = {}  # filled in from the pipeline: the definitions that `data.tasks` names
    efforts: EffortSettings | None = None  # filled in from the pipeline


class SftStage(_Stage):
    kind: Literal["sft"]
    config: SftSettings


class RlvrStage(_Stage):
    kind: Literal["rlvr"]
    config: RlvrSettings


class OpdStage(_Stage):
    kind: Literal["opd"]
    config: OpdSettings


class EvalStage(_Stage):
    kind: Literal["eval"]
    config: EvalSettings


class MergeStage(_Stage):
    kind: Literal["merge"]
    config: MergeSettings


class SampleStage(_Stage):
    kind: Literal["sample"]
    config: SampleSettings


AnyStage = SftStage | RlvrStage | OpdStage | EvalStage | MergeStage | SampleStage
StageSettings = Annotated[AnyStage, Field(discriminator="kind")]


class Tracking(Settings):
    enabled: bool = True
    uri: str | None = None  # an MLflow server; absent: SQLite in the workspace
    experiment: str | None = None  # the pipeline's name where absent


class PipelineSettings(Settings):
    """The whole file but `stages`, which are validated one instance at a time after the fan-out."""

    name: Name
    seed: Seed = 0
    axes: dict[Name, list[AxisValue]] = {}
    model: ModelSettings
    tasks: dict[Name, TaskSettings] = {}
    efforts: EffortSettings | None = None
    machine: Machine = Machine()
    workers: Workers = Workers()
    tracking: Tracking = Tracking()
    scale: dict[str, Any] = {}  # numbers that stages refer to as ${scale...}
