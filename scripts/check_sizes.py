"""The house rules that no linter knows: sizes, error boundaries, unfinished work, and paths that belong to one machine.

python scripts/check_sizes.py        prints a table; exit code 1 and one `file:line: problem` a line when broken
"""

import ast
import io
import math
import re
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FUNCTION_MAX = 60
FUNCTION_P95 = 40
FILE_MAX = 400
# broad `except`s allowed: here any error becomes an exit code, a check's outcome, or a server that does not answer
BOUNDARIES = {"cli": 1, "worker": 1, "backends": 1, "jail": 1, "tracking": 1}

UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX|NotImplementedError)\b")
LOCAL_PATH = re.compile(r"(?<![\w.$}{/-])/(tmp|work|home|root|Users|mnt|opt)/\w")
PACKAGE_HOST = re.compile(r"(pypi\.org|pythonhosted\.org|download\.pytorch\.org|npmjs\.org|index-url|find-links)")
EXCUSE = re.compile(r"#\s*(type:\s*ignore|noqa)(?P<code>\[[\w, -]+\]|:\s*[A-Z]+\d+(,\s*[A-Z]+\d+)*)?(?P<reason>.*)")
NOT_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING,
    tokenize.ENDMARKER,
}  # fmt: skip

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Module:
    name: str  # relative to the repository root
    text: str
    tree: ast.Module

    @property
    def lines(self) -> int:
        return self.text.count("\n")


def main() -> int:
    package, tests = modules("opdctl"), modules("tests")
    sizes = {f"{m.name}:{f.lineno} {f.name}": size for m in package for f, size in functions(m)}
    problems = [p for m in package + tests for p in file_problems(m)]
    problems += [p for m in package for p in [*excuses(m), *unfinished(m)]] + broad_excepts(package)
    problems += [
        f"{where}: {n} lines of code, at most {FUNCTION_MAX}" for where, n in sizes.items() if n > FUNCTION_MAX
    ]
    p95 = percentile(sorted(sizes.values()), 0.95)
    if p95 > FUNCTION_P95:
        problems.append(f"opdctl: 95 % of the functions should have at most {FUNCTION_P95} lines of code; it is {p95}")
    problems += [p for path in texts() for p in foreign_names(path)]
    report(package, tests, sizes, p95)
    print("\n".join(problems), file=sys.stderr, end="\n" if problems else "")
    return 1 if problems else 0


def modules(folder: str) -> list[Module]:
    paths = sorted((ROOT / folder).rglob("*.py"))
    return [Module(str(p.relative_to(ROOT)), (text := p.read_text()), ast.parse(text)) for p in paths]


def functions(module: Module) -> Iterator[tuple[Function, int]]:
    """Every function with its lines of code: without its docstring, comments and blank lines."""
    code = code_lines(module.text)
    for node in ast.walk(module.tree):
        if isinstance(node, Function):
            documented = ast.get_docstring(node, clean=False) is not None
            first = node.body[0]
            docstring = range(first.lineno, (first.end_lineno or 0) + 1) if documented else range(0)
            span = range(node.lineno, (node.end_lineno or 0) + 1)
            yield node, len([n for n in span if n in code and n not in docstring])


def code_lines(text: str) -> set[int]:
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return {n for t in tokens if t.type not in NOT_CODE for n in range(t.start[0], t.end[0] + 1)}


def file_problems(module: Module) -> Iterator[str]:
    if module.lines > FILE_MAX:
        yield f"{module.name}:{FILE_MAX + 1}: {module.lines} lines, at most {FILE_MAX}"


def broad_excepts(package: list[Module]) -> list[str]:
    found: dict[str, list[str]] = {}
    for module in package:
        part = module.name.split("/")[1].removesuffix(".py")
        lines = [line for node in ast.walk(module.tree) if (line := broad_except(node))]
        found.setdefault(part, []).extend(f"{module.name}:{line}" for line in lines)
    excess = [where for part, all_ in found.items() for where in all_[BOUNDARIES.get(part, 0) :]]
    return [f"{where}: catches every exception; name the ones it can handle" for where in excess]


def broad_except(node: ast.AST) -> int | None:
    """The line of `except:`, `except Exception`, `except BaseException` or `suppress(...)` of either."""
    if isinstance(node, ast.ExceptHandler):
        return node.lineno if node.type is None or names_everything(node.type) else None
    if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "suppress":
        return node.lineno if any(names_everything(a) for a in node.args) else None
    return None


def names_everything(expression: ast.expr) -> bool:
    return any(isinstance(n, ast.Name) and n.id in {"Exception", "BaseException"} for n in ast.walk(expression))


def excuses(module: Module) -> Iterator[str]:
    for number, line in enumerate(module.text.splitlines(), 1):
        match = EXCUSE.search(line)
        if match and not (match["code"] and match["reason"].strip(" #-:")):
            yield f"{module.name}:{number}: an ignored rule needs its code and, after it, the reason"


def unfinished(module: Module) -> Iterator[str]:
    for number, line in enumerate(module.text.splitlines(), 1):
        if match := UNFINISHED.search(line):
            yield f"{module.name}:{number}: {match[0]}: finish it, or open an issue and leave it out"


def texts() -> list[Path]:
    """What users read or run."""
    folders = [p for f in ("opdctl", "conf", "pipelines", "runbooks") for p in sorted((ROOT / f).rglob("*"))]
    wanted = {".py", ".yaml", ".md"}
    files = [
        *sorted(ROOT.glob("*.md")),
        ROOT / "Makefile",
        ROOT / "constraints.txt",
        ROOT / "requirements-verl.txt",
        ROOT / ".ci" / "run",
    ]
    return files + [p for p in folders if p.suffix in wanted and p.is_file()]


def foreign_names(path: Path) -> Iterator[str]:
    for number, line in enumerate(path.read_text().splitlines(), 1):
        where = f"{path.relative_to(ROOT)}:{number}"
        if match := LOCAL_PATH.search(line):
            yield f"{where}: {match[0]}...: a path of one machine"
        if match := PACKAGE_HOST.search(line):
            yield f"{where}: {match[0]}: a package host; installers know theirs"


def percentile(ordered: list[int], share: float) -> int:
    """Nearest rank: the smallest value that `share` of the values do not exceed; 0 of an empty list."""
    return ordered[math.ceil(share * len(ordered)) - 1] if ordered else 0


def report(package: list[Module], tests: list[Module], sizes: dict[str, int], p95: int) -> None:
    longest, largest = max(sizes, key=lambda k: sizes[k], default="-"), max(package, key=lambda m: m.lines)
    rows = [
        ("functions", str(len(sizes)), ""),
        ("lines of code, median", str(percentile(sorted(sizes.values()), 0.5)), ""),
        ("lines of code, p95", str(p95), f"at most {FUNCTION_P95}"),
        ("lines of code, longest", str(sizes.get(longest, 0)), f"at most {FUNCTION_MAX}: {longest}"),
        ("files", f"{len(package)}", f"{sum(m.lines for m in package)} lines"),
        ("lines, largest file", str(largest.lines), f"at most {FILE_MAX}: {largest.name}"),
        ("test files", str(len(tests)), f"{sum(m.lines for m in tests)} lines"),
    ]
    for name, value, note in rows:
        print(f"{name:24}{value:>6}  {note}".rstrip())


if __name__ == "__main__":
    sys.exit(main())
