"""Try every attack and print a table: `python -m scripts.attacks`. Exit code 1 if any succeeds."""

import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from opdctl.jail import Jail
from opdctl.tasks import verifiers
from scripts.attacks import KINDS, Interpreter, attempt, programs
from scripts.attacks.answers import ANSWERS


def main() -> int:
    totals: dict[str, Counter[str]] = {}
    interpreters: tuple[Interpreter, ...] = ("cpython", "auto")
    with Jail(1) as jail:
        for interpreter in interpreters:
            for attack in programs():
                result = attempt(jail, attack, interpreter)
                row = totals.setdefault(f"programs {attack.kind.replace('_', ' ')}, {interpreter}", Counter())
                row["tried"] += 1
                row["scored"] += result.scored
                row["escaped"] += result.escaped
                row["others spoilt"] += not result.others
                if result.scored or result.escaped or not result.others:
                    print(f"SUCCEEDED: {attack.name} ({interpreter}): {result}", file=sys.stderr)
    verifiers.LIMITS = replace(verifiers.LIMITS, cpu_s=1.0)
    row = totals["answers"] = Counter()
    with TemporaryDirectory() as folder:
        canary = Path(folder, "canary")
        for answer in ANSWERS:
            judge = verifiers.resolve(answer.verifier)
            completion = answer.completion.replace("CANARY", str(canary))
            [verdict] = judge([(completion, answer.answer)])
            [honest] = judge([(answer.answer, answer.answer)]) if answer.verifier == "math_verify" else [None]
            row["tried"] += 1
            row["scored"] += verdict.correct
            row["escaped"] += canary.exists()
            row["others spoilt"] += honest is not None and not honest.correct
            if verdict.correct or canary.exists():
                print(f"SUCCEEDED: {answer.name}", file=sys.stderr)
    columns = ("tried", "scored", "escaped", "others spoilt")
    print(f"| attacks | {' | '.join(columns)} |\n|---|{'---:|' * len(columns)}")
    for name, row in totals.items():
        print(f"| {name} | {' | '.join(str(row[column]) for column in columns)} |")
    total = sum(totals.values(), Counter())
    print(f"\n{total['tried']} tried, {total['scored']} scored, {total['escaped']} escaped.")
    return int(any(total[column] for column in columns[1:]))


if __name__ == "__main__":
    assert KINDS
    sys.exit(main())
