"""The gate: what is asked of models, data and graders before a stage trains. Nothing here enters a stage's identity."""

from typing import Annotated, Literal

from pydantic import Field

from opdctl.fields import Count, Fraction, Positive, Settings

GateCheck = Literal[
    "vocabulary",  # student and teacher, id by id
    "width",  # rows of their output matrices
    "special_tokens",
    "eos",
    "generation_config",
    "chat_template",
    "context",  # prompt + response + 1 within every model's context
    "routing",
    "interleaving",  # rows of different teachers follow one another
    "overlap",  # between training and evaluation
    "origin",  # does the teacher descend from the student's checkpoint?
    "same_model",  # the teacher is the student
    "random_teacher",
    "deterministic",
    "direct_forward",
    "distance",  # per-token reverse KL on the student's rollouts
    "entropy_gap",
    "topk_overlap",
    "headroom",  # has the teacher something to teach on these prompts?
    "grader",
    "difficulty",  # prompts whose whole group passes, or fails
    "loss_mask",  # demonstrations without a token to learn
]


class GateSettings(Settings):
    """Thresholds; opdctl/verdicts.py says what comes of them."""

    enabled: bool = True
    models: bool = True  # ask the models too; false: files only
    accept: list[GateCheck] = []  # refusals of these are noted in the lineage, and the stage starts
    rollouts: Count = 24  # completions of the student that each teacher is asked about
    max_completion_tokens: Count = 64  # of each of them; less where the stage's own limit is lower
    near: Positive = 0.04  # nats of reverse KL per token: one origin (as reported of MOPD, arXiv:2606.30406)
    far: Positive = 0.19  # a foreign, stronger teacher started here and diverged (as of MOPD)
    overlap: Fraction = 0.72  # of the top 16 tokens: where successful distillations start (arXiv:2604.13016)
    entropy_gap: Positive = 0.3  # nats: all the entropy that the student of MOPD has (arXiv:2606.30406)
    grader_rows: Count = 8  # of each task: reference, shuffled and empty answers are graded
    difficulty_prompts: Annotated[int, Field(ge=0)] = 8  # per task, `group_size` completions each
    difficulty: Fraction = 0.95  # more groups than this without a difference: warned; 1: stages may learn nothing

    @property
    def idle(self) -> bool:
        """Stages of seconds may learn nothing: models that stayed as they were, or say nothing, are no news."""
        return self.difficulty >= 1
