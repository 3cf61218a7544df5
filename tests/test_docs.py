"""The README and the runbooks are true: their commands run, their links lead somewhere, their trees are the trees."""

import os
import re
import shlex
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = pytest.mark.xdist_group("docs")  # with --dist loadgroup one process makes the workspace for all of them

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "runbooks").rglob("*.md"))]
NOT_RUN_AT_MOST = 4

# Stands in for the installed script: whatever the text leaves unsaid is chosen so that a recipe takes seconds.
STAND_IN = """#!{python}
import sys
from opdctl.cli import main
arguments = sys.argv[1:]
if arguments and arguments[0] in ("run", "plan", "validate", "check"):
    quick = (
        "scale=smoke scale.sft.max_steps=5 scale.opd.max_steps=2 scale.eval.prompts=2 tracking.enabled=false "
        "scale.agents.sft.max_steps=5 scale.agents.opd.max_steps=2 "
    )
    other = any(given.startswith("scale=") and given != "scale=smoke" for given in arguments)
    if arguments[1:] and "kimi_k3" in arguments[1] and not other:
        quick += "axes.domain=[general,general_agents] axes.loss=[topk,full_vocab]"
    for setting in quick.split():
        if not any(given.startswith(setting.split("=")[0] + "=") for given in arguments):
            arguments.append(setting)
main(arguments)
"""


@dataclass(frozen=True)
class Block:
    text: str
    not_run: str  # why it is not, if it is not

    def commands(self) -> str:
        """The lines after `$ `, with their continuations; what the commands print is left out."""
        lines, continues = [], False
        for line in self.text.splitlines():
            if continues or line.startswith("$ "):
                lines.append(line.removeprefix("$ "))
                continues = line.endswith("\\")
        return "\n".join(lines)


def console_blocks(document: Path) -> list[Block]:
    """Those of a planted fault are left to `test_runbooks.py`."""
    pattern = r"(?:<!-- (?P<how>not run|planted): (?P<why>[^>]+) -->\n+)?^```console\n(?P<text>\$ opdctl.*?)^```$"
    found = re.finditer(pattern, document.read_text(), re.MULTILINE | re.DOTALL)
    return [Block(match["text"], match["why"] or "") for match in found if match["how"] != "planted"]


def example_files(document: Path) -> dict[str, str]:
    """Files that the text asks its reader to save: `<!-- file: PATH -->`, then a fenced block."""
    pattern = r"^<!-- file: (?P<path>\S+) -->\n+^```\w*\n(?P<text>.*?)^```$"
    found = re.finditer(pattern, document.read_text(), re.MULTILINE | re.DOTALL)
    return {match["path"]: match["text"] for match in found}


def name(document: Path) -> str:
    return str(document.relative_to(ROOT))


WITH_COMMANDS = [d for d in DOCUMENTS if any(not block.not_run for block in console_blocks(d))]


@pytest.fixture(scope="session")
def finished_workspace(tmp_path_factory) -> tuple[Path, dict[str, str]]:
    """A workspace whose run `kimi_k3` is finished at the scale of seconds, and the environment to use it in."""
    folder = tmp_path_factory.mktemp("docs")
    script = folder / "bin" / "opdctl"
    script.parent.mkdir()
    script.write_text(STAND_IN.format(python=sys.executable))
    script.chmod(0o755)
    environment = os.environ | {"PATH": f"{script.parent}{os.pathsep}{os.environ['PATH']}", "COLUMNS": "120"}
    workspace = folder / "workspace"
    for command in (
        f"opdctl init {workspace}",
        f"cd {workspace}; opdctl run pipelines/kimi_k3.yaml tracking.enabled=true",
    ):
        done = subprocess.run(["bash", "-c", command], cwd=folder, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return workspace, environment


@pytest.mark.parametrize("document", WITH_COMMANDS, ids=name)
def test_commands_of_the_document_run_one_after_another(document, finished_workspace):
    workspace, environment = finished_workspace
    for path, text in example_files(document).items():
        (workspace / path).parent.mkdir(parents=True, exist_ok=True)
        (workspace / path).write_text(text)
    script = "\n".join(block.commands() for block in console_blocks(document) if not block.not_run)

    done = subprocess.run(
        ["bash", "-euxo", "pipefail", "-c", script],
        cwd=workspace, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL,
    )  # fmt: skip

    assert done.returncode == 0, f"{name(document)}: exit {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-4000:]}"


def test_few_commands_are_left_unrun():
    unrun = {name(d): [b.not_run for b in console_blocks(d) if b.not_run] for d in DOCUMENTS}

    assert sum(len(reasons) for reasons in unrun.values()) <= NOT_RUN_AT_MOST, unrun


def test_every_command_of_the_command_line_is_in_the_readme():
    import typer.main

    from opdctl.cli import app

    commands = set(typer.main.get_command(app).commands)
    table = set(re.findall(r"^\| `(\w+)", (ROOT / "README.md").read_text(), re.MULTILINE))

    assert table == commands


def test_every_option_named_in_the_documents_exists():
    import typer.main

    from opdctl.cli import app

    commands = typer.main.get_command(app).commands
    for document in WITH_COMMANDS:
        for line in (line for b in console_blocks(document) for line in b.commands().splitlines()):
            words = shlex.split(line.rstrip("\\"))
            if words[:1] == ["opdctl"] and words[1] in commands:
                command = commands[words[1]]
                command = getattr(command, "commands", {}).get(" ".join(words[2:3]), command)  # `data show`
                known = {option for parameter in command.params for option in parameter.opts}
                given = {word.split("=")[0] for word in words if word.startswith("--")}
                assert given <= known | {"--help"}, f"{name(document)}: {line}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_links_between_documents_lead_to_files(document):
    links = re.findall(r"\]\((?!https?://)([^)#]+)", document.read_text())

    assert [link for link in links if not (document.parent / link).exists()] == []


def test_layers_of_the_contributing_guide_are_those_that_are_enforced():
    enforced = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]["layers"]
    told = "".join(f"    {layer.replace(' :', ',')}\n" for layer in enforced)

    assert f"\n\n{told}\n" in (ROOT / "CONTRIBUTING.md").read_text()


def test_layout_of_the_readme_names_every_module_and_nothing_else():
    section = (ROOT / "README.md").read_text().split("## Layout")[1].split("\n## ")[0]
    named, folders = set(), {}
    for indent, entry in re.findall(r"^    ( *)([\w./]+)(?:  |$)", section, re.MULTILINE):
        depth = len(indent) // 2
        path = folders.get(depth - 1, "") + entry
        folders[depth] = path
        named.add(path)
    modules = {str(p.relative_to(ROOT)) for p in (ROOT / "opdctl").rglob("*.py") if p.name[:2] != "__"}

    assert {path for path in named if path.endswith(".py") and "/__" not in path} == modules
    assert [path for path in named if not (ROOT / path).exists()] == []
