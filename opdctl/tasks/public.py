"""Which module has which published task."""

from pathlib import Path

from opdctl.settings import (
    AnyPublicTask,
    BfclTask,
    EffortSettings,
    Gsm8kTask,
    HumanEvalTask,
    IfevalTask,
    MathTask,
    MawpsTask,
    MbppTask,
    ReasoningGymTask,
    WordProblemTask,
)
from opdctl.tasks.published import Published


def open_public(
    name: str, settings: AnyPublicTask, efforts: EffortSettings | None, workspace: Path | None
) -> Published:
    match settings:
        case WordProblemTask():
            from opdctl.tasks.word_problems import WordProblems

            return WordProblems(name, settings, efforts, workspace)
        case Gsm8kTask() | MawpsTask():
            from opdctl.tasks.final_number import FinalNumber

            return FinalNumber(name, settings, efforts, workspace)
        case MathTask():
            from opdctl.tasks.math import Math

            return Math(name, settings, efforts, workspace)
        case MbppTask():
            from opdctl.tasks.code import Mbpp

            return Mbpp(name, settings, efforts, workspace)
        case HumanEvalTask():
            from opdctl.tasks.code import HumanEval

            return HumanEval(name, settings, efforts, workspace)
        case IfevalTask():
            from opdctl.tasks.ifeval import Ifeval

            return Ifeval(name, settings, efforts, workspace)
        case ReasoningGymTask():
            from opdctl.tasks.reasoning_gym import ReasoningGym

            return ReasoningGym(name, settings, efforts)
        case BfclTask():
            from opdctl.tasks.bfcl import Bfcl

            return Bfcl(name, settings, efforts, workspace)
