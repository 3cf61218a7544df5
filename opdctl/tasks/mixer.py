"""How a mixture's rows are dealt over its tasks and efforts: evenly, and by their numbers alone."""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from opdctl.settings import Mixture
from opdctl.tasks import Demonstration, Prompt, Split, Task
from opdctl.tasks.environment import EnvironmentTask


def stream_seed(seed: int, *parts: object) -> int:
    """A seed of its own for a stream of rows or random numbers, the same on every machine."""
    return zlib.crc32(":".join(map(str, (seed, *parts))).encode())


@dataclass(frozen=True)
class Row:
    """One prompt of a mixture, with what is needed to judge and to route its completions."""

    task: str
    prompt: Prompt
    index: int  # of the cell's stream; the same index is the same problem at every effort of one `cell`
    cell: int  # which (task, effort) of the mixture
    environment: EnvironmentTask | None = None  # plays its completions in turns

    @property
    def key(self) -> int:
        """Names the row in counter-based random numbers: different for all rows of a mixture."""
        return self.index * 4096 + self.cell


class Deal:
    """Deals rows to hands, `shares[i]` to hand i in every turn of sum(shares) rows, as evenly as whole rows can be.

    Which hand a row goes to depends on its number alone.
    """

    def __init__(self, shares: Sequence[int]) -> None:
        self.turn = sum(shares)
        # share k of s lies at (2k + 1) / 2s of the turn: a hand's rows come evenly spaced, not in a lump
        order = sorted(
            ((Fraction(2 * k + 1, 2 * share), hand) for hand, share in enumerate(shares) for k in range(share))
        )
        self._places = [[at for at, (_, dealt) in enumerate(order) if dealt == hand] for hand in range(len(shares))]

    def before(self, hand: int, row: int) -> int:
        """How many of the rows 0 .. row-1 go to the hand. A turn's last place is dealt first."""
        return sum((row + place) // self.turn for place in self._places[hand])


class Mixer:
    """Deals a mixture's prompts over its cells (task x effort), each task its share of them, ordered by cell.

    Rows start .. start+count-1 depend on the mixture, the seed and their numbers alone.
    """

    def __init__(self, tasks: dict[str, Task], mixture: Mixture, split: Split, seed: int) -> None:
        self.tasks, self.split, self.seed = tasks, split, seed
        efforts: Sequence[str | None] = mixture.efforts or [None]
        self.mixture = mixture
        self.cells = [(task, effort) for task in mixture.tasks for effort in efforts]
        self._cell_deal = Deal([mixture.ratios.get(task, 1) for task, _ in self.cells])
        self._task_deal = Deal([mixture.ratios.get(task, 1) for task in mixture.tasks])

    def rows(self, start: int, count: int) -> list[Row]:
        rows: list[Row] = []
        for cell in range(len(self.cells)):
            dealt = self.dealt(cell, start, count)
            rows += self.cell_rows(cell, dealt.start, len(dealt))
        return rows

    def dealt(self, cell: int, start: int, count: int) -> range:
        """Of rows start .. start+count-1 those that the cell gets, by their numbers in its own stream."""
        return range(self._cell_deal.before(cell, start), self._cell_deal.before(cell, start + count))

    def cell_rows(self, cell: int, first: int, count: int, effort: str | None = None) -> list[Row]:
        """`count` rows of one cell's stream; with `effort` the same problems asked at another effort."""
        if count == 0:
            return []
        task, own = self.cells[cell]
        stream, asked, distinct = self.stream(cell), effort or own, self.mixture.distinct
        if distinct is None or self.split == "eval":
            prompts = self.tasks[task].prompts(self.split, stream, first, count, asked)
        else:
            few = self.tasks[task].prompts(self.split, stream, 0, distinct, asked)
            prompts = [few[i % distinct] for i in range(first, first + count)]
        played = self.tasks[task]
        environment = played if isinstance(played, EnvironmentTask) else None
        return [Row(task, prompt, first + i, cell, environment) for i, prompt in enumerate(prompts)]

    def stream(self, cell: int) -> int:
        """Seed of a cell's problems: evaluation asks the same ones at every effort, training as many as it can."""
        return self.seed if self.split == "eval" else stream_seed(self.seed, self.cells[cell][1])

    def demonstrations(self, start: int, count: int) -> list[tuple[str, Demonstration]]:
        """Rows start .. start+count-1 of the training split with answers, dealt over the tasks by their shares."""
        dealt: list[tuple[str, Demonstration]] = []
        for number, name in enumerate(self.mixture.tasks):
            first, last = (self._task_deal.before(number, at) for at in (start, start + count))
            shown = self.tasks[name].demonstrations(self.seed, first, last - first, self.mixture.efforts)
            dealt += [(name, demonstration) for demonstration in shown]
        return dealt
