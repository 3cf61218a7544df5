"""Questions over a corpus of texts that is searched: each needs several of them, one after another.

Without `corpus` a world is made of a seed: people, who work for firms, which have their seats in towns, which lie in
provinces, each with a page of its own. A question goes over one to three of these links, so what to search for next is
known from the page before only. Names are made up: nothing can be answered from memory.

With `corpus`, a folder of .txt and .md files or a file of rows with `id` and `text`, the questions are rows of
`questions`, with `question` and `answer`; they have no expert.

The final turn ends with `Answer: WORDS`, compared as SQuAD does (Rajpurkar et al., arXiv:1606.05250): without case,
punctuation and articles. Search is BM25 (`bm25.py`): libraries for it bring numpy or scipy for forty lines, and break
ties as it happens.
"""

import random
import re
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import ClassVar

from opdctl.errors import ConfigError
from opdctl.settings import EffortSettings, SearchTask
from opdctl.tasks import Prompt, ToolCall
from opdctl.tasks.environment import CallFormat
from opdctl.tasks.environments.bm25 import Bm25
from opdctl.tasks.environments.tool_task import (
    ANSWER,
    Episode,
    Problem,
    Script,
    ToolError,
    ToolTask,
    final_answer,
    read_problems,
    tool,
)
from opdctl.tasks.shards import BadRow, data_files, read_raw

SNIPPET, PAGE = 120, 4000  # characters shown of a text by search and by open
_ARTICLES = re.compile(r"\b(a|an|the)\b")


@dataclass(frozen=True)
class Corpus:
    texts: Mapping[str, str]  # id -> text
    index: Bm25

    @classmethod
    def of(cls, texts: Mapping[str, str]) -> "Corpus":
        return cls(texts, Bm25([f"{name} {text}" for name, text in texts.items()]))


def squad(answer: str) -> str:
    """An answer as it is compared."""
    bare = "".join(letter for letter in answer.lower() if letter not in string.punctuation)
    return " ".join(_ARTICLES.sub(" ", bare).split())


class SearchEpisode(Episode):
    tools = (
        tool("search", "The ids and beginnings of the texts that match best.", query="words to look for"),
        tool("open", "A whole text.", id="as search shows it"),
    )

    def __init__(self, problem: Problem, calls: CallFormat, corpus: Corpus, results: int) -> None:
        super().__init__(problem, calls)
        self._corpus, self._results = corpus, results

    def call(self, name: str, arguments: Mapping[str, str]) -> str:
        texts = self._corpus.texts
        if name == "open":
            if arguments["id"] not in texts:
                raise ToolError(f"no text {arguments['id'][:40]!r}; ids are those that search shows")
            text = texts[arguments["id"]]
            return text if len(text) <= PAGE else f"{text[:PAGE]} ... (cut)"
        ids = list(texts)
        found = [ids[number] for number in self._corpus.index.best(arguments["query"], self._results)]
        if not found:
            return "Nothing is found: no text holds any of these words."
        return "\n".join(f"{text}: {' '.join(texts[text][:SNIPPET].split())}" for text in found)

    def judge(self, final: str) -> str:
        answer = final_answer(final)
        if answer is None:
            return f"the last line does not begin with {ANSWER}"
        return "" if squad(answer) == squad(self.problem["answer"]) else f"it is {self.problem['answer']}"


class Search(ToolTask):
    instruction: ClassVar[str] = (
        "Answer the question from the texts that you find. When you know, end with a line like: Answer: a few words"
    )
    episode_class = SearchEpisode

    def __init__(
        self, name: str, settings: SearchTask, efforts: EffortSettings | None, folder: Path | None = None
    ) -> None:
        self.settings, at = settings, folder or Path.cwd()
        rows = None
        if settings.corpus is None:
            self.world = world(settings.seed, settings.people)
            self.corpus = Corpus.of(self.world.texts)
        else:
            assert settings.questions is not None
            self.corpus = Corpus.of(read_corpus(at / settings.corpus, f"tasks.{name}.corpus"))
            rows = read_problems(at / settings.questions, f"tasks.{name}.questions", _row)
        super().__init__(name, efforts, settings.held_out, rows)

    def generated(self, rng: random.Random) -> Problem:
        person = rng.choice(self.world.people)
        hops = rng.choice(self.settings.hops)
        question = (
            f"Which firm does {person} work for?",
            f"In which town is the firm that {person} works for?",
            f"In which province is the town of the firm that {person} works for?",
        )[hops - 1]
        path = self.world.path(person)
        return {"question": question, "path": path[:hops], "answer": path[hops]}

    def environment(self, prompt: Prompt, calls: CallFormat) -> SearchEpisode:
        return SearchEpisode(prompt.answer, calls, self.corpus, self.settings.results)

    def expert(self, problem: Problem) -> Script:
        if "path" not in problem:
            raise ConfigError(
                f"tasks.{self.name}: questions of a file have no demonstrations: they cannot be used by sft"
            )
        script: list[tuple[str, list[ToolCall]]] = []
        for subject in problem["path"]:
            script.append(("", [ToolCall("search", {"query": subject})]))
            script.append(("", [ToolCall("open", {"id": subject})]))
        return [*script, (f"{ANSWER} {problem['answer']}", [])]


def _row(raw: Mapping[str, str]) -> Problem:
    if not squad(raw["answer"]):
        raise ValueError("the answer is empty")
    return {"question": raw["question"], "answer": raw["answer"]}


def read_corpus(path: Path, key: str) -> dict[str, str]:
    """id -> text. Raises ConfigError, naming `key`, where there is none, and for an id that comes twice."""
    texts: dict[str, str] = {}
    if path.is_dir() and (files := sorted(file for file in path.rglob("*") if file.suffix in (".txt", ".md"))):
        return {str(file.relative_to(path)): file.read_text("utf-8", errors="replace") for file in files}
    for file in data_files(path, key):
        for number, raw in read_raw(file, ("id", "text"), key):
            if isinstance(raw, BadRow) or not all(isinstance(raw.get(column), str) for column in ("id", "text")):
                raise ConfigError(f"{key}: {file}, row {number}: wanted: the columns id and text, both text")
            if texts.setdefault(raw["id"], raw["text"]) is not raw["text"]:
                raise ConfigError(f"{key}: {file}, row {number}: id {raw['id']!r} comes twice")
    return texts


# ------------------------------------------------------------------------------------------------- the made-up world

_HEADS = (
    "Bar",
    "Cal",
    "Dor",
    "Fen",
    "Gal",
    "Hol",
    "Ker",
    "Lin",
    "Mor",
    "Nor",
    "Pel",
    "Ros",
    "Sel",
    "Tam",
    "Vor",
    "Wen",
)
_MIDDLES = ("a", "e", "i", "o", "u", "an", "el", "ir", "on", "us")
_TAILS = ("bert", "dan", "fort", "gar", "lin", "mond", "nard", "rick", "sen", "ton", "vik", "well")
_FIRST = ("Ada", "Bruno", "Celia", "Dario", "Edda", "Falk", "Greta", "Hanno", "Ilse", "Jonas", "Kira", "Lasse", "Mira",
          "Nils", "Orla", "Pavel", "Rhea", "Silas", "Thea", "Ulla")  # fmt: skip
_TRADES = ("glass", "rope", "paper", "clocks", "bells", "tiles", "lamps", "boats", "maps", "flutes")
_JOBS = ("clerk", "tailor", "painter", "guard", "cook", "driver", "designer", "buyer")


@dataclass(frozen=True)
class World:
    people: Sequence[str]
    links: Mapping[str, str]  # person -> firm -> town -> province
    texts: Mapping[str, str]

    def path(self, person: str) -> list[str]:
        """A person, the firm, its town and its province."""
        found = [person]
        while found[-1] in self.links:
            found.append(self.links[found[-1]])
        return found


@lru_cache(maxsize=4)
def world(seed: int, people: int) -> World:
    """Made of a seed: a firm for every three people, a town for every two firms, a province for every three towns."""
    rng = random.Random(f"world {seed}")
    stems = [head + middle + tail for head in _HEADS for middle in _MIDDLES for tail in _TAILS]
    rng.shuffle(stems)
    names = [f"{first} {stem}" for first in _FIRST for stem in stems[:60]]
    firms = [f"{stem} & Co" for stem in stems[60 : 60 + max(2, people // 3)]]
    rest = stems[60 + len(firms) :]
    towns = [f"{stem}ham" for stem in rest[: max(2, len(firms) // 2)]]
    provinces = [f"{stem}shire" for stem in rest[len(towns) : len(towns) + max(2, len(towns) // 3)]]
    folk = rng.sample(names, people)
    links, texts = {}, {}
    for person in folk:
        links[person] = rng.choice(firms)
        texts[person] = f"{person} is a {rng.choice(_JOBS)} at {links[person]}, and was born in {rng.choice(towns)}."
    for firm in firms:
        links[firm] = rng.choice(towns)
        texts[firm] = (
            f"{firm} makes {rng.choice(_TRADES)}. Its workshop is in {links[firm]}. "
            f"It sells to {rng.choice(provinces)}."
        )
    for town in towns:
        links[town] = rng.choice(provinces)
        texts[town] = f"{town} is a town of {rng.randint(2, 90)},000 people in {links[town]}."
    for province in provinces:
        texts[province] = f"{province} is a province known for its {rng.choice(_TRADES)}."
    return World(folk, links, texts)
