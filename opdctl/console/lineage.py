"""Where a checkpoint came from: a graph of checkpoints drawn as a tree, as Mermaid text or as data.

A checkpoint that several others read is drawn in full once; later mentions point back to it.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.text import Text
from rich.tree import Tree

from opdctl.console import join
from opdctl.console.metrics import duration, key_metrics
from opdctl.lineage import Node


def lineage_tree(nodes: Mapping[str, Node], roots: Sequence[str]) -> list[Tree]:
    """A tree for each root, from the checkpoint down to the models nothing made here."""
    drawn: set[str] = set()
    trees: list[Tree] = []
    for root in roots:
        tree = Tree(_line(nodes[root], ""), guide_style="dim")
        drawn.add(root)
        _grow(tree, nodes, root, drawn)
        trees.append(tree)
    return trees


def _grow(tree: Tree, nodes: Mapping[str, Node], key: str, drawn: set[str]) -> None:
    for edge in nodes[key].parents:
        node = nodes[edge.parent]
        if edge.parent in drawn and node.parents:
            tree.add(Text.assemble((f"{edge.role}: ", "cyan"), (node.title, "bold"), (" (above)", "dim")))
        else:
            drawn.add(edge.parent)
            _grow(tree.add(_line(node, edge.role)), nodes, edge.parent, drawn)


def _line(node: Node, role: str) -> Text:
    facts = join(
        (
            node.kind,
            f"step {node.step}" if node.step else "",
            key_metrics(node.kind, node.metrics),
            duration(node.seconds) if node.seconds else "",
        )
    )
    line = Text.assemble((f"{role}: " if role else "", "cyan"), (node.title, "bold"), f"  {facts}" if facts else "")
    if node.note:
        line.append(f"  {node.note}", style="yellow")
    return line


def lineage_mermaid(nodes: Mapping[str, Node]) -> str:
    """A flow chart: parents above what was made from them, roles on the arrows."""
    names = {key: f"n{at}" for at, key in enumerate(nodes)}
    lines = ["flowchart TD"]
    for key, node in nodes.items():
        title = re.sub(r'["<>]', " ", node.title)
        accepted = f"accepted: {', '.join(node.accepted)}" if node.accepted else ""
        small = join((node.kind, f"step {node.step}" if node.step else "", accepted))
        left, right = ("[", "]") if node.parents else ("([", "])")
        lines.append(f'    {names[key]}{left}"{title}{f"<br/>{small}" if small else ""}"{right}')
    lines += [
        f"    {names[edge.parent]} -->|{edge.role}| {names[key]}"
        for key, node in nodes.items()
        for edge in node.parents
    ]
    return "\n".join(lines)


def lineage_data(nodes: Mapping[str, Node], roots: Sequence[str]) -> dict[str, Any]:
    return {"roots": list(roots), "checkpoints": {key: asdict(node) for key, node in nodes.items()}}
