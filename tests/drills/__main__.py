"""`make drills`: all of them, JOBS at a time, and docs/drills.md; with numbers as arguments only these, and no file.

Ctrl-C ends it with what was done by then; the rest stands in the file as not carried out.
"""

import os
import shutil
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

from drills import report
from drills.drill import Verdict, carry_out
from drills.faults import SEED, drills
from drills.rehearsal import rehearse


def main(numbers: list[int]) -> int:
    """1 if one was not survived."""
    began, chosen = time.monotonic(), [drill for drill in drills() if not numbers or drill.number in numbers]
    folder = Path(tempfile.mkdtemp(prefix="drills-"))
    known = rehearse(folder, sorted({drill.subject for drill in chosen}))
    verdicts: list[Verdict] = []
    commit = report.commit()
    loads, jobs = [os.getloadavg()[0]], int(os.environ.get("JOBS", "2"))
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        waiting = {pool.submit(carry_out, drill, known, folder, SEED): drill for drill in chosen}
        try:
            for done in as_completed(list(waiting)):
                drill, error = waiting.pop(done), done.exception()
                broken = Verdict(drill, [f"the drill itself failed: {error!r}"])
                verdicts.append(broken if error else done.result())
                loads.append(os.getloadavg()[0])
                _tell(verdicts[-1], len(verdicts), len(chosen))
                if verdicts[-1].survived:
                    shutil.rmtree(folder / f"drill-{drill.number}", ignore_errors=True)
        except KeyboardInterrupt:
            verdicts += [Verdict(drill, skipped=report.INTERRUPTED) for drill in waiting.values()]
            pool.shutdown(wait=False, cancel_futures=True)
    lost = sorted(one.drill.number for one in verdicts if not one.survived)
    if not numbers:
        how = report.How(SEED, commit, time.monotonic() - began, jobs, loads)
        report.FILE.write_text(report.table(verdicts, how))
    print(f"{len(chosen) - len(lost)} of {len(chosen)} survived, {time.monotonic() - began:.0f} s")
    if lost:
        print(
            f"what is left of the others is in {folder}; to repeat them: make drills ONLY='{' '.join(map(str, lost))}'"
        )
    else:
        shutil.rmtree(folder)
    return 1 if lost else 0


def _tell(verdict: Verdict, number: int, of: int) -> None:
    what = "survived" if verdict.survived else f"SKIPPED: {verdict.skipped}" if verdict.skipped else "NOT SURVIVED"
    asked = f" after {', '.join(verdict.remedies)}" if verdict.remedies else ""
    print(f"[{number}/{of}] {verdict.drill.name}: {what}{asked} ({verdict.seconds:.0f} s)", flush=True)
    if verdict.problems:
        print(
            "  " + "\n  ".join(verdict.problems),
            f"\n{verdict.story}\n  repeat: make drills ONLY={verdict.drill.number}",
        )


if __name__ == "__main__":
    sys.exit(main([int(number) for argument in sys.argv[1:] for number in argument.split()]))
