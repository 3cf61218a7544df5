"""The gate: may a stage start? Checks that files answer, before anything starts and again beside the models that were
just made; `opdctl/engine/gate.py` asks the models.

`pairs.py` says who is compared with whom. A check gives one verdict for each pair, model or task that it looks at:

    vocabulary         the same word at every id                                        language.py
    width              rows of the output matrices, as stored                           language.py
    special_tokens     the same special tokens, at the same ids                         language.py
    eos                the ids that end an answer                                       language.py
    generation_config  penalties and the like that only one model was made with         language.py
    chat_template      the difference, line by line                                     language.py
    context            sequences within every model's positions, prompts within bounds  lengths.py
    same_model         a teacher is another model than the student                      origin.py
    origin             both descend from one checkpoint: by records, else by weights    origin.py
    routing            a teacher for every row                                          rows.py
    interleaving       a step's rows are not all of one teacher                         rows.py
    overlap            no prompt of an evaluation was trained on                        rows.py
"""

from collections.abc import Iterator
from pathlib import Path

from opdctl.backends.contract import StageSpec
from opdctl.gate.language import check_model, check_pair, check_stops
from opdctl.gate.lengths import check_context
from opdctl.gate.origin import check_origin
from opdctl.gate.pairs import pairs, parties
from opdctl.gate.rows import check_rows, forget
from opdctl.settings import GateSettings
from opdctl.verdicts import Verdict

__all__ = ["check_files", "forget"]


def check_files(spec: StageSpec, settings: GateSettings) -> list[Verdict]:
    """Verdicts on the inputs of a stage whose folders are there; without PyTorch. `forget` drops the rows that this
    keeps in memory for the next stage."""
    return list(_verdicts(spec, settings))


def _verdicts(spec: StageSpec, settings: GateSettings) -> Iterator[Verdict]:
    models = parties(spec)
    for party in models:
        yield from check_model(party)
        yield from check_stops(spec, party)
    alone = sum(given.role == "teachers" for given in spec.inputs) < 2
    for pair in pairs(spec, models):
        yield from check_pair(pair)
        yield from check_origin(pair, Path(spec.workspace), spec.seed, alone=alone, idle=settings.idle)
    yield from check_context(spec, models)
    yield from check_rows(spec)
