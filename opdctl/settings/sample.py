"""Stage kind `sample`: a model's answers as data."""

from typing import Literal

from opdctl.fields import Count, Settings
from opdctl.settings.train import Mixture, Rollout


class SampleSettings(Settings):
    """A model's answers to training prompts as demonstrations for SFT stages (their input role `data`)."""

    data: Mixture
    rollout: Rollout  # `prompts`: per task and effort; `group_size`: tries per prompt
    keep: Literal["correct", "all"] = "correct"  # of the answers that end; those cut short are never kept
    per_prompt: Count = 1  # answers kept of a prompt at most, the first ones
    save_every: Count = 256  # prompts between two saves of the recovery state
