"""The environment that the runbook shows works as it is shown."""

import json
import re
import types
from pathlib import Path

from opdctl.tasks import Prompt
from opdctl.tasks.call_formats import call_format

RUNBOOK = Path(__file__).resolve().parents[2] / "runbooks" / "write-an-environment.md"
ASK = "<call> guess number: {} </call>"


def example():
    [text] = re.findall(r"<!-- file: guess\.py -->\n+```python\n(.*?)^```$", RUNBOOK.read_text(), re.DOTALL | re.M)
    module = types.ModuleType("guess")
    exec(compile(text, "guess.py", "exec"), module.__dict__)  # the runbook's own text
    return module.Guess(Prompt("<guess>", "5", {}), call_format(None))


def test_the_example_is_played_to_its_end():
    episode = example()
    assert episode.step(ASK.format(3)).observation == "low"
    assert episode.step("<call> guess").observation == "error: </call> is missing"
    assert episode.step(ASK.format("x")).counts == {"calls": 1}
    saved = json.loads(json.dumps(episode.state()))
    end = episode.step(ASK.format(5))
    assert (end.done, end.reward) == (True, 1.0)
    assert episode.verdict().correct
    again = example()
    again.restore(saved)
    assert again.step("no idea").done
    assert not again.verdict().correct
