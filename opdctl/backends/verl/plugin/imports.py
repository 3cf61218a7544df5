"""To act on a module once it has been imported.

Every process of a run loads the plug-in, and most of them need little of verl and nothing of vLLM: to import a module
only in order to change it would cost each of them seconds.
"""

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

Act = Callable[[ModuleType], None]


def when_imported(name: str, act: Act) -> None:
    """Call `act(module)` as soon as module `name` has run, before its importer goes on; now, if it already has.

    An error in `act` fails the import.
    """
    if name in sys.modules:
        act(sys.modules[name])
        return
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)
    _FINDER.acts.setdefault(name, []).append(act)


class _Finder(MetaPathFinder):
    def __init__(self) -> None:
        self.acts: dict[str, list[Act]] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self.acts:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next((spec for finder in others if (spec := finder.find_spec(fullname, path, target))), None)
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def run_and_act(module: ModuleType) -> None:
            run(module)
            for act in self.acts.get(fullname, []):
                act(module)

        spec.loader.exec_module = run_and_act  # type: ignore[method-assign]  # the loader serves this module only
        return spec


_FINDER = _Finder()
