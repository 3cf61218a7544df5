"""Tasks of several turns, in which a model acts and an environment answers."""

from opdctl.fields import Settings


class EnvironmentTaskSettings(Settings):
    """What makes a task one that is played in turns: `rollout.turns` bounds its episodes."""
