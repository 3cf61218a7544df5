"""From a stage to the command line that makes verl carry it out. Pure: nothing is read or written."""

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from opdctl.backends.contract import StageSpec
from opdctl.backends.verl.layout import BOOTSTRAP, SETTINGS_VARIABLE, layout
from opdctl.backends.verl.overrides import Overrides
from opdctl.backends.verl.render_engine import on_cpu
from opdctl.backends.verl.render_opd import opd, teacher_pool
from opdctl.backends.verl.render_rl import rlvr
from opdctl.backends.verl.render_sft import sft
from opdctl.settings import Resources

_KINDS = {"sft": sft, "rlvr": rlvr, "opd": opd}


@dataclass(frozen=True)
class Command:
    environment: Mapping[str, str]  # to be added to the caller's
    argv: Sequence[str]  # the interpreter first

    def shell(self) -> str:
        """For a shell, one argument a line."""
        words = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        words += [shlex.quote(word) for word in self.argv]
        return " \\\n  ".join(words)


def command(spec: StageSpec) -> Command:
    """The trainer's command line. Raises ConfigError for raw overrides of keys that opdctl sets."""
    python = str(spec.workers["python"])
    if spec.kind == "sft":
        processes = Resources.model_validate(spec.resources).verl.gpus_per_node
        torchrun = ["torch.distributed.run", "--standalone", "--nnodes=1", f"--nproc_per_node={processes}"]
        start = [python, "-m", *torchrun, "-m", "verl.trainer.sft_trainer"]
    else:
        start = [python, "-m", "verl.trainer.main_ppo"]
    return Command(environment(spec), [*start, *overrides(spec).arguments()])


def overrides(spec: StageSpec) -> Overrides:
    """All of verl's keys that differ from its defaults or whose defaults differ from place to place."""
    rendered = _KINDS[spec.kind](spec)
    if spec.kind != "sft":
        _ray(rendered, spec)
    rendered.own(
        "opdctl finds saves and logs in the stage's folder",
        {"hydra.run.dir": str(layout(spec).log.parent), "hydra.output_subdir": None, "hydra/job_logging": "stdout"},
    )
    rendered.add_raw(spec.verl)
    return rendered


def environment(spec: StageSpec) -> dict[str, str]:
    """Variables of every process that verl starts, besides the caller's."""
    files = layout(spec)
    given = {
        "PYTHONPATH": str(BOOTSTRAP),
        "PYTHONUNBUFFERED": "1",
        "VERL_USE_EXTERNAL_MODULES": "opdctl_verl",
        "VERL_FILE_LOGGER_PATH": str(files.log),
        SETTINGS_VARIABLE: str(files.settings),
        "HYDRA_FULL_ERROR": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(files.train.with_name("cache")),  # verl copies the rows that it reads
        "TRANSFORMERS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "RAY_USAGE_STATS_ENABLED": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }
    if not on_cpu(spec):
        return given
    return given | {
        "PYTHONPATH": os.pathsep.join((str(BOOTSTRAP), str(BOOTSTRAP / "cpu"))),  # cpu: who looks for `vllm` finds it
        "VERL_PLATFORM": "cpu",
        "OMP_NUM_THREADS": "1",  # of each of dozens of processes
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "GLOO_SOCKET_IFNAME": "lo",
        "RAY_worker_niceness": "0",
    }


def _ray(rendered: Overrides, spec: StageSpec) -> None:
    """A Ray of the stage's own, or a running cluster, whose processes know nothing of the caller's environment."""
    at = "ray_kwargs.ray_init"
    if (address := spec.workers["ray_address"]) is not None:
        rendered.own(
            "workers.verl.ray_address",
            {f"+{at}.address": address, f"{at}.num_cpus": None}
            | {f"+{at}.runtime_env.env_vars.{name}": value for name, value in environment(spec).items()},
        )
        rendered.own("workers.verl.python", {f"{at}.runtime_env.py_executable": spec.workers["python"]})
        return
    rendered.choose({f"+{at}.include_dashboard": False})
    if not on_cpu(spec):
        rendered.choose({f"{at}.num_cpus": None})
        return
    resources = Resources.model_validate(spec.resources)
    teachers = sum(given.role == "teachers" for given in spec.inputs)
    per_node, nodes = teacher_pool(teachers, resources, alone=True) if teachers else (0, 0)
    slots = resources.verl.gpus_per_node + per_node * nodes
    # Ray counts what verl reserves, not cores: there must be enough, and a "GPU" is a process on the CPU
    rendered.choose(
        {f"{at}.num_cpus": 16 + 4 * slots, f"+{at}.num_gpus": slots, f"+{at}.object_store_memory": 200_000_000}
    )
