"""The reference for every key that a pipeline file may hold: names, types, limits, vetted defaults; a module a topic.

Pure data. A key without a default is one that no paper or library can choose for the user: it must be written in
the pipeline or in the scale. `resources` and `machine` (`opdctl/workers.py`) and `gates` never enter a stage's
identity; all other keys do.
"""

from opdctl.fields import NAME_PATTERN, AxisValue, Settings
from opdctl.settings.eval import EvalBudget, EvalSettings, SelectSettings
from opdctl.settings.grading import Endpoint, Grader
from opdctl.settings.merge import MergeSettings
from opdctl.settings.model import FolderModel, ModelSettings, NewModel, Qwen3Shape, WordTokenizer
from opdctl.settings.opd import (
    ForwardKlOpd,
    FullVocabOpd,
    JsdOpd,
    MarginCalibration,
    MiniLlmOpd,
    OpdLoss,
    OpdSettings,
    OverlapOpd,
    PolicyGradientOpd,
    TopKOpd,
    UpdateExtrapolation,
)
from opdctl.settings.pipeline import PipelineSettings, Tracking
from opdctl.settings.policy_loss import (
    Baseline,
    CispoSurrogate,
    ClippedSurrogate,
    Dis,
    IcePop,
    LogRatioClip,
    Mismatch,
    Opsm,
    Reinforce,
    SequenceMask,
    Surrogate,
    Tis,
)
from opdctl.settings.rlvr import DynamicSampling, EffortBudget, Kl, Overlong, RlvrSettings
from opdctl.settings.sample import SampleSettings
from opdctl.settings.sft import SftSettings
from opdctl.settings.stage import (
    AnyStage,
    EvalStage,
    Foreach,
    Gate,
    InputValue,
    MergeStage,
    OpdStage,
    RlvrStage,
    RoundInput,
    SampleStage,
    SelectStage,
    SftStage,
    StageSettings,
    WeightedInput,
)
from opdctl.settings.task import TASKS, AnyTask, ChainTask, EffortSettings, FileTask, TaskSettings
from opdctl.settings.train import Budget, Mixture, Optimizer, Rollout, Train
from opdctl.workers import Machine, Resources

__all__ = [
    "NAME_PATTERN",
    "TASKS",
    "AnyStage",
    "AnyTask",
    "AxisValue",
    "Baseline",
    "Budget",
    "ChainTask",
    "CispoSurrogate",
    "ClippedSurrogate",
    "Dis",
    "DynamicSampling",
    "EffortBudget",
    "EffortSettings",
    "Endpoint",
    "EvalBudget",
    "EvalSettings",
    "EvalStage",
    "FileTask",
    "FolderModel",
    "Foreach",
    "ForwardKlOpd",
    "FullVocabOpd",
    "Gate",
    "Grader",
    "IcePop",
    "InputValue",
    "JsdOpd",
    "Kl",
    "LogRatioClip",
    "Machine",
    "MarginCalibration",
    "MergeSettings",
    "MergeStage",
    "MiniLlmOpd",
    "Mismatch",
    "Mixture",
    "ModelSettings",
    "NewModel",
    "OpdLoss",
    "OpdSettings",
    "OpdStage",
    "Opsm",
    "Optimizer",
    "OverlapOpd",
    "Overlong",
    "PipelineSettings",
    "PolicyGradientOpd",
    "Qwen3Shape",
    "Reinforce",
    "Resources",
    "RlvrSettings",
    "RlvrStage",
    "Rollout",
    "RoundInput",
    "SampleSettings",
    "SampleStage",
    "SelectSettings",
    "SelectStage",
    "SequenceMask",
    "Settings",
    "SftSettings",
    "SftStage",
    "StageSettings",
    "Surrogate",
    "TaskSettings",
    "Tis",
    "TopKOpd",
    "Tracking",
    "Train",
    "UpdateExtrapolation",
    "WeightedInput",
    "WordTokenizer",
]
