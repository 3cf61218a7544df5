"""The keys of stage kind `merge`: how the weights of several models become one. Pure data.

theta_i: weights of model i of the input role `models`, w_i its `weight` there; theta_0: weights of the input role
`base`, which the methods have that work on task vectors tau_i = theta_i - theta_0. The computations are in
`opdctl/engine/merge_methods.py`.
"""

from typing import Annotated, Literal

from pydantic import Field

from opdctl.fields import Settings

Share = Annotated[float, Field(gt=0, le=1)]
DropRate = Annotated[float, Field(ge=0, lt=1)]


class LinearMerge(Settings):
    """Model soup: sum w_i theta_i / sum w_i."""

    method: Literal["linear"]


class ConvexMerge(Settings):
    """UI-TARS-2: sum w_i theta_i. The weights, which the report does not disclose, must sum to 1."""

    method: Literal["convex"]


class TaskArithmeticMerge(Settings):
    method: Literal["task_arithmetic"]
    scale: float  # lambda


class TiesMerge(Settings):
    """Trim, elect sign, merge the entries that agree."""

    method: Literal["ties"]
    density: Share  # of the entries of each task vector that are kept, in every tensor: the largest
    scale: float  # lambda


class DareMerge(Settings):
    """Drop entries of the task vectors at random (the stage's seed), rescale what is left."""

    method: Literal["dare"]
    drop_rate: DropRate
    rescale: bool = True  # by 1 / (1 - drop_rate)
    sign: Literal["none", "ties"] = "none"  # ties: elect a sign and average the entries that agree; none: sum
    scale: float  # lambda


class SceMerge(Settings):
    """Select, calculate, erase. It weighs the models itself: their `weight`s must be 1."""

    method: Literal["sce"]
    select: Share  # of the entries in which the models differ, those with the largest variance, in every tensor


class LongcatFusionMerge(Settings):
    """LongCat-Flash-Thinking: normalise, drop, erase. The report discloses none of these numbers and norms."""

    method: Literal["longcat_fusion"]
    norm: Literal["l1", "l2"]  # that all task vectors have alike once they are normalised: the mean of theirs
    scope: Literal["tensor", "model"]  # what a norm is taken of
    drop_rate: DropRate
    rescale: bool  # by 1 / (1 - drop_rate)
    combine: Literal["sum", "mean"]  # of the entries that are left
    scale: float  # lambda


MergeMethod = Annotated[
    LinearMerge | ConvexMerge | TaskArithmeticMerge | TiesMerge | DareMerge | SceMerge | LongcatFusionMerge,
    Field(discriminator="method"),
]
WITHOUT_BASE = (LinearMerge, ConvexMerge)


class MergeSettings(Settings):
    merge: MergeMethod
    precision: Literal["float32", "bfloat16"]  # of the published weights; the arithmetic is in float32
