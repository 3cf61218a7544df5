"""A task in turns for tests: the model is told how often it has spoken, until it says a word for the third time."""

from opdctl.tasks import Demonstration, Prompt, Turn, Verdict
from opdctl.tasks.environment import Step

WORD = "w5"


class Counting:
    """Episodes of `turns` turns; reward is the share of turns in which the model wrote WORD."""

    def __init__(self, turns=3, told="w9 w9"):
        self.turns, self.told = turns, told
        self.open = 0
        self.actions = []

    def prompts(self, split, seed, start, count, effort=None):
        return [Prompt(f"w{3 + i % 20} w4", i, {"domain": "counting"}) for i in range(start, start + count)]

    def size(self, split):
        return None

    def demonstrations(self, seed, start, count, efforts=()):
        turns = [Turn(f"w{6 + n} {WORD}", (), f"{self.told} w{10 + n}") for n in range(self.turns)]
        return [Demonstration(prompt, "", turns) for prompt in self.prompts("train", seed, start, count)]

    def verify(self, prompt, completion):
        raise AssertionError("an episode is judged by its environment")

    def reference(self, prompt):
        return None

    def environment(self, prompt, calls):
        self.open += 1
        return _Episode(self)


class _Episode:
    def __init__(self, task):
        self.task, self.taken, self.hits = task, 0, 0

    def step(self, action):
        self.task.actions.append(action)
        self.taken += 1
        hit = WORD in action.split()
        self.hits += hit
        done = self.taken == self.task.turns
        told = "" if done else f"{self.task.told} w{10 + self.taken - 1}"
        return Step(told, done, float(hit), {"calls": 1, "valid_calls": float(hit)})

    def verdict(self):
        return Verdict(self.hits == self.task.turns, self.hits / self.task.turns)

    def state(self):
        return {"taken": self.taken, "hits": self.hits}

    def restore(self, state):
        self.taken, self.hits = state["taken"], state["hits"]

    def close(self):
        self.task.open -= 1
