"""Stage kind `eval` by another program than ours: `harness` chooses."""

from typing import Annotated, Literal

from pydantic import Field

from opdctl.fields import Count, Seed, Settings


class HarnessSettings(Settings):
    """EleutherAI's lm-evaluation-harness: prompts, splits, filters and metrics are those of its tasks.

    Each of its tasks is a cell of the report. `limit` takes the first problems, all where null.
    """

    harness: Literal["lm_eval"]
    tasks: Annotated[list[str], Field(min_length=1)]  # lm-eval's names of tasks and groups
    include_path: str | None = None  # folder with task files of your own; relative to the workspace, as their data are
    # task -> METRIC or METRIC,FILTER that says whether a problem is solved, 0 or 1; the task's first where absent
    metrics: dict[str, str] = {}
    num_fewshot: Annotated[int, Field(ge=0)] | None = None  # null: the task's own
    limit: Count | None = None
    apply_chat_template: bool = False
    batch_size: Count = 8
    precision: Literal["float32", "bfloat16"] = "float32"
    confidence: Annotated[float, Field(gt=0, lt=1)] = 0.95
    seed: Seed = 1234  # of the solved problems that a prompt shows: lm-eval's default
