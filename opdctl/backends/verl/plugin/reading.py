"""How verl reads opdctl's rows: in their order, as they are rendered."""

from types import ModuleType
from typing import Any

from opdctl.backends.verl.plugin.imports import when_imported


def install() -> None:
    """Takes effect in the processes of verl that read rows."""
    when_imported("torch.utils.data", _keep_the_order)
    when_imported("verl.utils.dataset.multiturn_sft_dataset", _keep_turns_apart)
    when_imported("verl.utils.tokenizer.continuous_token_wiring", _add_no_tokens)


def _keep_the_order(data: ModuleType) -> None:
    """verl/trainer/sft_trainer.py always shuffles. The rows are dealt over tasks and steps already."""

    class InOrder(data.DistributedSampler):  # type: ignore[name-defined,misc]  # of a module that is being imported
        def __init__(self, *args: Any, shuffle: bool = False, **options: Any) -> None:
            super().__init__(*args, shuffle=False, **options)

    data.DistributedSampler = InOrder  # type: ignore[attr-defined]  # as above


def _keep_turns_apart(dataset: ModuleType) -> None:
    """verl/utils/dataset/multiturn_sft_dataset.py reads prompt and answer apart, as the embedded engine does, and then
    both as one text to compare: which a tokenizer of whole words cannot read, for no blank is between them.
    """
    dataset.MultiTurnSFTDataset.sanity_check = lambda self, *given, **named: None


def _add_no_tokens(wiring: ModuleType) -> None:
    """verl/utils/tokenizer/continuous_token_wiring.py chooses by the model's type how turns are put together, and for
    Qwen's insists on tokens that another tokenizer need not have. opdctl's prompts are one turn, rendered.
    """
    create = wiring.create_continuous_token_builder

    def create_continuous_token_builder(tokenizer: Any, **options: Any) -> Any:
        options |= {"model_family": wiring.ContinuousTokenModelFamily.DEFAULT, "hf_model_type": None}
        return create(tokenizer, **options)

    wiring.create_continuous_token_builder = create_continuous_token_builder  # type: ignore[attr-defined]  # untyped
