"""Two tasks in turns for models of some hundred words: a user of a tool, and a fixer of programs.

`lookup`: `<ask> c a f <max> 3` names keys and a start state. What a key does to the state (an operation of the chain
task's domain `math`) is known to the tool alone: `<call> get key: c a </call>` is answered by `<obs> *2 +1`. The last
turn, without a call, is the final state. At a low effort all keys are asked for at once and the result is worked out
unseen; at a high one the state is written after every key.

`repair`: `<fix> *2 =0 +1 l3: 5 3 <max>` shows a program of lines, each an operation of the same domain, and a report:
line 3 should make 3 of 5, and does not. `<call> edit l3: *2 </call>` replaces a line, and `<call> run </call>` runs the
tests and is answered by `<obs> pass` or by the next one that fails, `<obs> l3: 0 3`. A turn may do both. A turn without
a call ends the episode; then hidden tests decide: all states, the visible ones among them. One failing test fits
several operations; effort buys more of them, and a try that turned out wrong can be mended.

Demonstrations are by a sloppy writer, so that reinforcement has something to gain: see `LookupTask`, `RepairTask`.
"""

import random
from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping, Sequence
from typing import Any, ClassVar

from opdctl.errors import ConfigError
from opdctl.settings import EffortSettings, LookupTask, RepairTask
from opdctl.tasks import Demonstration, Prompt, Split, ToolCall, Turn, Verdict, effort_wording, first_group, is_held_out
from opdctl.tasks import turns as messages_of
from opdctl.tasks.chain import DOMAINS
from opdctl.tasks.environment import CallFormat, Step

Problem = Mapping[str, Any]  # plain JSON
Writer = Generator[tuple[str, list[ToolCall]], str, None]  # (text, calls) of a turn; what is observed
_DOMAIN = DOMAINS["math"]
_MAKES = {  # operation -> state -> state
    op: dict(zip(_DOMAIN.states, (_DOMAIN.states[step(i)[0]] for i in range(len(_DOMAIN.states))), strict=True))
    for op, step in _DOMAIN.steps.items()
}
OBSERVED, ERROR, DONE = "<obs>", "error", "done"
KEYS = "abcdefg"


class _Episode(ABC):
    """Counts: `calls`, and `valid_calls`, those that could be read and carried out."""

    def __init__(self, problem: Problem, calls: CallFormat | None) -> None:
        self.problem, self.calls = problem, calls
        self.final: str | None = None  # the text that ended the episode

    @abstractmethod
    def answer(self, call: ToolCall) -> str | None:
        """What the tool says; None for a call that cannot be carried out."""

    @abstractmethod
    def wrong(self, final: str) -> str:
        """Why an episode that ended so is wrong, "" where it is right."""

    def step(self, action: str) -> Step:
        assert self.calls is not None
        try:
            return self.act(*self.calls.parse(action))
        except ValueError:
            return Step(f"{OBSERVED} {ERROR}", done=False, counts={"calls": 1.0})

    def act(self, text: str, calls: Sequence[ToolCall]) -> Step:
        """A turn that says the text and makes the calls."""
        if not calls:
            self.final = text
            return Step("", done=True, reward=self.verdict().reward)
        answers = [self.answer(call) for call in calls]
        counts = {"calls": float(len(calls)), "valid_calls": float(len(calls) - answers.count(None))}
        return Step(" ".join([OBSERVED, *(told or ERROR for told in answers)]), done=False, counts=counts)

    def verdict(self) -> Verdict:
        reason = "the episode has not ended" if self.final is None else self.wrong(self.final)
        return Verdict(not reason, float(not reason), {"reason": reason})

    def state(self) -> dict[str, Any]:
        return {"final": self.final}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.final = state["final"]

    def close(self) -> None:  # noqa: B027  # holds nothing
        ...


class _Stream(ABC):
    """Problems made of their numbers. `Prompt.answer` is the problem."""

    mark: ClassVar[str]  # begins a prompt
    tools: ClassVar[Sequence[Mapping[str, Any]]]

    def __init__(self, name: str, settings: LookupTask | RepairTask, efforts: EffortSettings | None) -> None:
        self.name, self.efforts = name, efforts
        self._held_out, self._obey = settings.held_out, settings.obey
        if not 0 < settings.held_out < 1:
            raise ConfigError(f"tasks.{name}.held_out: {settings.held_out} leaves a split without problems")
        key, styles = ("strides", settings.strides) if isinstance(settings, LookupTask) else ("runs", settings.runs)
        for effort in efforts.levels if efforts else ():
            if effort not in styles:
                raise ConfigError(f"tasks.{name}.{key}: no entry for effort {effort!r}")

    @abstractmethod
    def problem(self, rng: random.Random) -> Problem:
        """One at random; its `content` decides whether it is held out."""

    @abstractmethod
    def question(self, problem: Problem, asked: str) -> str:
        """The prompt's text; `asked` is what asks for the effort."""

    @abstractmethod
    def written(self, rng: random.Random, problem: Problem, effort: str | None) -> Writer:
        """The sloppy writer: yields his turns, and is sent what the environment says."""

    @abstractmethod
    def episode(self, problem: Problem, calls: CallFormat | None) -> _Episode: ...

    def size(self, split: Split) -> int | None:
        return None

    def environment(self, prompt: Prompt, calls: CallFormat) -> _Episode:
        return self.episode(prompt.answer, calls)

    def prompts(self, split: Split, seed: int, start: int, count: int, effort: str | None = None) -> list[Prompt]:
        return [
            self._prompt(self._drawn(self._rng(split, seed, row), split), effort, first_group(self.name) + row)
            for row in range(start, start + count)
        ]

    def _prompt(self, problem: Problem, effort: str | None, group: int) -> Prompt:
        asked = effort_wording(self.name, self.efforts, effort)
        text = self.question(problem, "")
        messages = messages_of(self.efforts, asked, text)
        columns = {"domain": self.name} if effort is None else {"domain": self.name, "effort": effort}
        return Prompt(text if messages else self.question(problem, asked), problem, columns, messages, group)

    def _rng(self, stream: str, seed: int, row: int) -> random.Random:
        return random.Random(f"{self.name} {stream} {seed} {row}")

    def _drawn(self, rng: random.Random, split: Split) -> Problem:
        while True:
            problem = self.problem(rng)
            if is_held_out(problem["content"], self._held_out) == (split == "eval"):
                return problem

    def demonstrations(self, seed: int, start: int, count: int, efforts: Sequence[str] = ()) -> list[Demonstration]:
        for effort in efforts:
            effort_wording(self.name, self.efforts, effort)
        return [self._shown(seed, row, efforts) for row in range(start, start + count)]

    def _shown(self, seed: int, row: int, efforts: Sequence[str]) -> Demonstration:
        rng = self._rng("demonstrations", seed, row)
        problem = self._drawn(rng, "train")
        asked = efforts[row % len(efforts)] if efforts else None
        style = rng.choice(list(dict.fromkeys(efforts))) if efforts and rng.random() >= self._obey else asked
        episode, writer = self.episode(problem, None), self.written(rng, problem, style)
        turns: list[Turn] = []
        text, calls = next(writer)
        while True:
            observation = episode.act(text, calls).observation
            turns.append(Turn(text, calls, observation))
            if episode.final is not None:
                return Demonstration(self._prompt(problem, asked, 0), "", turns)
            text, calls = writer.send(observation)

    def verify(self, prompt: Prompt, completion: str) -> Verdict:
        """Of a last turn without any before it."""
        episode = self.episode(prompt.answer, None)
        episode.act(completion, [])
        return episode.verdict()

    def reference(self, prompt: Prompt) -> str | None:
        return None


# ------------------------------------------------------------------------------------------------------- lookup


def _schema(name: str, description: str, **arguments: str) -> dict[str, Any]:
    properties = {key: {"type": "string", "description": said} for key, said in arguments.items()}
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


class Lookup(_Stream):
    mark = "<ask>"
    tools = (_schema("get", "What keys do to the state.", key="one key or more, separated by blanks"),)

    def __init__(self, name: str, settings: LookupTask, efforts: EffortSettings | None) -> None:
        super().__init__(name, settings, efforts)
        self.settings = settings
        self._ops, self._frequencies = list(_DOMAIN.steps), _DOMAIN.frequencies().tolist()

    def problem(self, rng: random.Random) -> Problem:
        ops = rng.choices(self._ops, self._frequencies, k=len(KEYS))
        keys = rng.sample(KEYS, self.settings.keys)
        store, start = dict(zip(KEYS, ops, strict=True)), rng.choice(_DOMAIN.states)
        return {
            "content": " ".join([start, *(store[key] for key in keys)]),
            "store": store,
            "keys": keys,
            "start": start,
        }

    def question(self, problem: Problem, asked: str) -> str:
        return " ".join([self.mark, *problem["keys"], *([asked] if asked else []), problem["start"]])

    def episode(self, problem: Problem, calls: CallFormat | None) -> _Episode:
        return _LookupEpisode(problem, calls)

    def written(self, rng: random.Random, problem: Problem, effort: str | None) -> Writer:
        """Looks keys up, `strides[effort]` a turn. Applies a misread operation, or writes a state at random, now and
        then; a call without its key is answered by an error, over which he passes."""
        settings, keys, state, told = self.settings, problem["keys"], problem["start"], ""
        stride = min(settings.strides.values()) if effort is None else settings.strides[effort]
        for at in range(0, len(keys), stride):
            asked = {} if rng.random() < settings.fumble else {"key": " ".join(keys[at : at + stride])}
            heard = yield told, [ToolCall("get", asked)]
            ops = [op for op in heard.split() if op in _DOMAIN.steps]
            for op in ops:
                state = _sloppy(rng, state, op, settings.misread, settings.noise)
            told = state
        yield told, []


def _sloppy(rng: random.Random, state: str, op: str, misread: float, noise: float) -> str:
    if op == _DOMAIN.misread[0] and rng.random() < misread:
        op = _DOMAIN.misread[1]
    return rng.choice(_DOMAIN.states) if rng.random() < noise else _MAKES[op][state]


class _LookupEpisode(_Episode):
    def answer(self, call: ToolCall) -> str | None:
        keys = str(call.arguments.get("key", "")).split()
        if call.name != "get" or len(call.arguments) != 1 or not keys or any(key not in KEYS for key in keys):
            return None
        return " ".join(self.problem["store"][key] for key in keys)

    def wrong(self, final: str) -> str:
        state = self.problem["start"]
        for key in self.problem["keys"]:
            state = _MAKES[self.problem["store"][key]][state]
        return "" if final.split()[-1:] == [state] else f"ends in {final.split()[-1:]}, not {state!r}"


# ------------------------------------------------------------------------------------------------------- repair


class Repair(_Stream):
    mark = "<fix>"
    tools = (
        _schema("run", "Runs the tests: the next one that fails, or pass."),
        _schema("edit", "Replaces a line.", **{f"l{n}": f"line {n}: an operation" for n in range(1, 5)}),
    )

    def __init__(self, name: str, settings: RepairTask, efforts: EffortSettings | None) -> None:
        super().__init__(name, settings, efforts)
        self.settings = settings

    def problem(self, rng: random.Random) -> Problem:
        program = rng.choices(list(_MAKES), k=self.settings.lines)
        line, right = rng.randrange(len(program)), rng.choice(list(_MAKES))
        while right == program[line]:
            right = rng.choice(list(_MAKES))
        order = rng.sample(_DOMAIN.states, len(_DOMAIN.states))
        # the report comes first: a state on which both differ
        order.sort(key=lambda state: _MAKES[right][state] == _MAKES[program[line]][state])
        order[1:] = rng.sample(order[1:], len(order) - 1)
        content = f"{' '.join(program)} {line} {right}"
        return {"content": content, "program": program, "line": line, "right": right, "order": order}

    def question(self, problem: Problem, asked: str) -> str:
        report = _told(problem, problem["line"], problem["order"][0])
        return " ".join([self.mark, *problem["program"], report, *([asked] if asked else [])])

    def episode(self, problem: Problem, calls: CallFormat | None) -> _Episode:
        return _RepairEpisode(problem, calls, self.settings.visible)

    def written(self, rng: random.Random, problem: Problem, effort: str | None) -> Writer:
        """Runs the tests `runs[effort]` times, the last time after his edit; where they then fail, edits again, and
        once more runs them only where he had run them before the edit. Heeds the report alone now and then, and takes
        an operation at random, or leaves the edit's argument out, now and then."""
        settings = self.settings
        runs = max(settings.runs.values()) if effort is None else settings.runs[effort]
        tests = [_told(problem, problem["line"], problem["order"][0])]
        for _ in range(runs - 1):
            heard = yield "", [ToolCall("run", {})]
            tests.append(heard.removeprefix(f"{OBSERVED} "))
        for again in (False, True):
            call = self._edit(rng, tests)
            checked = runs > again  # at one run the second edit goes unseen
            heard = yield "", [call, *([ToolCall("run", {})] if checked else [])]
            if not checked or not heard.endswith(tuple(_DOMAIN.states)):
                break
            tests.append(heard.split(" ", 2)[2])
        yield DONE, []

    def _edit(self, rng: random.Random, tests: Sequence[str]) -> ToolCall:
        if rng.random() < self.settings.fumble:
            return ToolCall("edit", {})
        line = tests[0].split()[0].rstrip(":")
        heeded = tests[:1] if rng.random() < self.settings.misread else tests
        pairs = [test.split()[1:] for test in heeded if test.startswith(line)]
        fitting = [op for op, makes in _MAKES.items() if all(makes[given] == wanted for given, wanted in pairs)]
        if rng.random() < self.settings.noise or not fitting:
            fitting = list(_MAKES)
        return ToolCall("edit", {line: rng.choice(fitting)})


def _told(problem: Problem, line: int, state: str) -> str:
    right = problem["right"] if line == problem["line"] else problem["program"][line]
    return f"l{line + 1}: {state} {_MAKES[right][state]}"


class _RepairEpisode(_Episode):
    def __init__(self, problem: Problem, calls: CallFormat | None, visible: int) -> None:
        super().__init__(problem, calls)
        self.program, self.shown = list(problem["program"]), 1
        self._tests = [(line, state) for state in problem["order"][:visible] for line in range(len(self.program))]

    def answer(self, call: ToolCall) -> str | None:
        if call.name == "run" and not call.arguments:
            return self._run()
        [(line, op)] = list(call.arguments.items()) if len(call.arguments) == 1 else [("", "")]
        number = int(line[1:]) - 1 if line[:1] == "l" and line[1:].isdecimal() else -1
        if call.name != "edit" or op not in _MAKES or not 0 <= number < len(self.program):
            return None
        self.program[number] = op
        return "ok"

    def _run(self) -> str:
        """The next failing test in turn: a run begins after the one that was shown last."""
        for at in range(self.shown, self.shown + len(self._tests)):
            line, state = self._tests[at % len(self._tests)]
            if self._fails(line, state):
                self.shown = at % len(self._tests) + 1
                return _told(self.problem, line, state)
        return "pass"

    def _fails(self, line: int, state: str) -> bool:
        right = self.problem["right"] if line == self.problem["line"] else self.problem["program"][line]
        return _MAKES[self.program[line]][state] != _MAKES[right][state]

    def wrong(self, final: str) -> str:
        failing = [
            (line, state) for line in range(len(self.program)) for state in _DOMAIN.states if self._fails(line, state)
        ]
        return f"line {failing[0][0] + 1} is wrong on {failing[0][1]}" if failing else ""

    def state(self) -> dict[str, Any]:
        return {**super().state(), "program": list(self.program), "shown": self.shown}

    def restore(self, state: Mapping[str, Any]) -> None:
        super().restore(state)
        self.program, self.shown = list(state["program"]), state["shown"]
