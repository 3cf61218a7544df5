"""The runbooks on faults are true: in a workspace with the fault planted, their commands print what they show.

A block of commands behind `<!-- planted: NAME -->` is run where `guards.plants.PLANTS[NAME]` was planted, with earlier
blocks of that name run before; `exit N` behind the name is how its last command ends. Lines that are shown below a
command are printed by it in this order, whatever numbers are in them; `...` stands for lines left out.
"""

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from guards.plants import PLANTS

ROOT = Path(__file__).resolve().parent.parent
FAULTS = [
    "diagnose-opd-divergence",
    "disk-full",
    "entropy-collapse",
    "recover-a-workspace",
    "resume-a-failed-stage",
    "stuck-run",
    "teacher-mismatch",
]
DOCUMENTS = {path.stem: path for path in sorted((ROOT / "runbooks").glob("*.md"))}
BLOCK = re.compile(
    r"<!-- planted: (?P<plant>[\w-]+)(?:, exit (?P<exit>\d+))? -->\n+^```console\n(?P<text>\$ .*?)^```$", re.M | re.S
)
PARTS = {"symptom", "evidence", "cause", "remedy"}


@dataclass(frozen=True)
class Block:
    plant: str
    exit: int
    text: str

    def commands(self) -> list[tuple[str, list[str]]]:
        """Each with the lines shown below it."""
        found: list[tuple[str, list[str]]] = []
        for line in self.text.splitlines():
            if line.startswith("$ "):
                found.append((line.removeprefix("$ "), []))
            else:
                found[-1][1].append(line)
        return found


def blocks(document: Path) -> list[Block]:
    found = BLOCK.finditer(document.read_text())
    return [Block(match["plant"], int(match["exit"] or 0), match["text"]) for match in found]


CASES = [(name, plant) for name in DOCUMENTS for plant in dict.fromkeys(b.plant for b in blocks(DOCUMENTS[name]))]


def plain(text: str) -> str:
    """Without numbers, and with runs of blanks as one: tables are as wide as their longest number."""
    return " ".join(re.sub(r"\d[\d.,]*(e[+-]?\d+)?", "#", text).split())


def missing(shown: list[str], printed: str) -> list[str]:
    """Lines shown that do not come, in their order."""
    lines, at, lost = [plain(line) for line in printed.splitlines()], 0, []
    for line in filter(None, map(plain, shown)):
        if line == "...":
            continue
        following = [number for number in range(at, len(lines)) if lines[number] == line]
        if following:
            at = following[0] + 1
        else:
            lost.append(line)
    return lost


@pytest.mark.parametrize(("name", "plant"), CASES)
def test_commands_print_what_the_runbook_shows(name, plant, tmp_path):
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    script = tmp_path / "bin" / "opdctl"
    script.parent.mkdir()
    module = PLANTS[plant](workspace)
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -W ignore -m {module} "$@"\n')
    script.chmod(0o755)
    environment = os.environ | {
        "PATH": f"{script.parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), str(ROOT)]),
        "COLUMNS": "120",
    }
    for block in (block for block in blocks(DOCUMENTS[name]) if block.plant == plant):
        commands = block.commands()
        for number, (command, shown) in enumerate(commands, start=1):
            done = subprocess.run(
                ["bash", "-c", f"{command} 2>&1"], cwd=workspace, env=environment, capture_output=True, text=True,
                stdin=subprocess.DEVNULL, timeout=300,
            )  # fmt: skip
            wanted = block.exit if number == len(commands) else 0
            assert done.returncode == wanted, f"$ {command}\n{done.stdout}"
            assert missing(shown, done.stdout) == [], f"$ {command}\n{done.stdout}"


@pytest.mark.parametrize("name", FAULTS)
def test_a_runbook_on_a_fault_tells_symptom_evidence_cause_and_remedy_and_shows_it(name):
    text = DOCUMENTS[name].read_text().lower()
    assert {part for part in PARTS if f"**{part}" not in text} == set()
    assert blocks(DOCUMENTS[name])


def test_every_alarm_leads_to_a_heading_of_a_runbook():
    from opdctl.watchdog.advice import ADVICE

    lost = []
    for rule, advice in ADVICE.items():
        path, _, anchor = advice.runbook.partition("#")
        headings = re.findall(r"^#+ (.+)$", (ROOT / path).read_text(), re.M) if (ROOT / path).is_file() else []
        if anchor not in [re.sub(r"[^\w\s-]", "", heading.lower()).replace(" ", "-") for heading in headings]:
            lost.append((rule, advice.runbook))
    assert lost == []
