"""Stage kind `sft`: supervised fine-tuning."""

from opdctl.fields import Count, Settings
from opdctl.settings.train import Mixture, Train


class SftSettings(Settings):
    data: Mixture  # of the tasks' own demonstrations, or of what the stages of the input role `data` sampled
    train: Train
    max_tokens: Count = 4096  # prompt and completion; a longer example is refused, never cut
