"""Tasks whose problems are solved with tools: a module for each. `tool_task` is what they share."""

from pathlib import Path

from opdctl.settings import AnyToolTask, CalculatorTask, EffortSettings, PythonTask, RepositoryTask, SearchTask
from opdctl.tasks.environments.calculator import Calculator
from opdctl.tasks.environments.python_tool import PythonTool
from opdctl.tasks.environments.repository import Repository
from opdctl.tasks.environments.search import Search
from opdctl.tasks.environments.tool_task import ToolTask


def open_tool_task(
    name: str, settings: AnyToolTask, efforts: EffortSettings | None, folder: Path | None = None
) -> ToolTask:
    """The task called `name`; relative paths start at `folder`."""
    match settings:
        case CalculatorTask():
            return Calculator(name, settings, efforts, folder)
        case PythonTask():
            return PythonTool(name, settings, efforts, folder)
        case SearchTask():
            return Search(name, settings, efforts, folder)
        case RepositoryTask():
            return Repository(name, settings, efforts)
