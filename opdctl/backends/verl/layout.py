"""Where a verl stage keeps its files: what goes on across attempts in the state folder, the rest in the attempt's."""

from dataclasses import dataclass
from pathlib import Path

from opdctl.backends.contract import StageSpec
from opdctl.settings import TASKS, EnvironmentTaskSettings

BOOTSTRAP = Path(__file__).with_name("bootstrap")  # on PYTHONPATH of everything that verl starts
ROUTE = "route"  # column of the OPD data that names the row's teacher
LOOP = "agent_name"  # column that names the agent loop of verl that plays the row; absent: it is answered at once
EPISODES, ONE_TURN = "opdctl_episodes", "single_turn_agent"  # values of LOOP
IMAGES = "images"  # column of paths, in data of vision-language tasks
SETTINGS_VARIABLE = "OPDCTL_VERL_SETTINGS"  # names Layout.settings to the plug-in


def teacher_key(number: int) -> str:
    """Value of the column ROUTE for the stage's teacher `number`."""
    return f"t{number}"


def has_images(spec: StageSpec) -> bool:
    """Then verl renders every prompt by the model's own template, and reads the images beside it."""
    return any(task.get("images") for task in spec.tasks.values())


def has_episodes(spec: StageSpec) -> bool:
    """Does one of the tasks play in turns?"""
    return any(issubclass(TASKS[task.get("task", "file")], EnvironmentTaskSettings) for task in spec.tasks.values())


@dataclass(frozen=True)
class Layout:
    train: Path  # parquet
    validation: Path  # parquet; verl wants one, and opdctl evaluates in stages of its own: a few rows
    settings: Path  # JSON: what the plug-in inside verl has to know
    checkpoints: Path  # verl's `trainer.default_local_dir`
    log: Path  # verl's JSONL, which every start of verl empties: a new one for each attempt
    new_model: Path  # folder for an input without one: `StageSpec.new_model`, made before verl starts
    failure: Path  # JSON {message, hint}: written by the plug-in, it ends the stage


def layout(spec: StageSpec) -> Layout:
    """Of an attempt; of a stage that is only planned the log's place is a stand-in."""
    state = Path(spec.state)
    attempt = Path(spec.events).parent if spec.events else state
    return Layout(
        state / "data" / "train.parquet",
        state / "data" / "validation.parquet",
        state / "data" / "settings.json",
        state / "checkpoints",
        attempt / "verl.jsonl",
        state / "data" / "new_model",
        state / "data" / "failure.json",
    )
