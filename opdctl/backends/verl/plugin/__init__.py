"""What opdctl adds to verl, in every process of a run: its losses and estimators, and on a machine without an
accelerator a CPU platform. Imported by `bootstrap/opdctl_verl.py` while `import verl` is under way.

Nothing of verl is imported for it: each part waits until verl has imported what it adds to.
"""

import os
from types import ModuleType

from opdctl.backends.verl import layout
from opdctl.backends.verl.plugin import metrics, reading, sockets
from opdctl.backends.verl.plugin.imports import when_imported


def _add_losses(_: ModuleType) -> None:
    from opdctl.backends.verl.plugin import losses

    losses.register()


def _add_topk_loss(module: ModuleType) -> None:
    from opdctl.backends.verl.plugin import losses

    losses.take_over_topk(module)


def _add_advantages(_: ModuleType) -> None:
    from opdctl.backends.verl.plugin import advantages, policy_losses

    advantages.register()
    policy_losses.register()


def _add_schedule(module: ModuleType) -> None:
    from opdctl.backends.verl.plugin import schedule

    schedule.take_over(module)


def _add_agent_loop(module: ModuleType) -> None:
    # made by name, for the class needs verl's own, of the module that is being imported
    loop = "opdctl.backends.verl.plugin.agent_loop.EpisodeLoop"
    module._agent_loop_registry[layout.EPISODES] = {"_target_": loop}


when_imported("verl.experimental.agent_loop.agent_loop", _add_agent_loop)
when_imported("verl.workers.engine.fsdp.transformer_impl", _add_schedule)
when_imported("verl.trainer.distillation.losses", _add_losses)
when_imported("verl.trainer.distillation.fsdp.losses", _add_topk_loss)
when_imported("verl.trainer.ppo.core_algos", _add_advantages)

metrics.install()
reading.install()
sockets.install()
if os.environ.get("VERL_PLATFORM") == "cpu":
    from opdctl.backends.verl.plugin import cpu

    cpu.install()
