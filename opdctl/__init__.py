"""LLM post-training recipes as one file: SFT, RLVR specialists, on-policy distillation, evaluation.

The command line is a thin layer over these functions:

    from pathlib import Path
    import opdctl

    workspace = opdctl.Workspace(Path("."))                    # the folder that holds runs/
    pipeline = opdctl.load_pipeline("kimi_k3", ["scale=smoke"], workspace=workspace.path)
    plan = opdctl.make_plan(pipeline, workspace.run("smoke"))  # changes nothing
    outcome = opdctl.execute(plan, reporter=opdctl.Silent())   # runs and resumes
    print(outcome.done, outcome.failed)

Names are imported at first use, so that `import opdctl` costs nothing.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opdctl.config import load_pipeline
    from opdctl.errors import OpdctlError
    from opdctl.plan import make_plan
    from opdctl.runner import Silent, execute
    from opdctl.store import Workspace

    __version__: str

__all__ = ["OpdctlError", "Silent", "Workspace", "__version__", "execute", "load_pipeline", "make_plan"]

_HOME = {
    "OpdctlError": "opdctl.errors",
    "Silent": "opdctl.runner",
    "Workspace": "opdctl.store",
    "execute": "opdctl.runner",
    "load_pipeline": "opdctl.config",
    "make_plan": "opdctl.plan",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("opdctl")
        except PackageNotFoundError:  # run from a checkout that was never installed
            return "0+uninstalled"
    if name not in _HOME:
        raise AttributeError(f"module 'opdctl' has no attribute '{name}'")
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
