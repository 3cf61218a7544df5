"""What the gate says of a student and a teacher once both have been asked (`probe.py`)."""

import math
from collections.abc import Iterator, Sequence
from itertools import combinations

from opdctl.engine.probe import Reading, Score
from opdctl.settings import GateSettings, OpdSettings
from opdctl.verdicts import Outcome, Verdict, unasked

KNOWN = 0.9  # this quantile of a teacher's log-probabilities ...
BLIND = -0.88  # ... is above BLIND * ln V if it knows anything: without training all are close to -ln V
LESS = 0.5  # ... and as far above -ln V as this share of the student's, if the student knows as little
FLAT = 0.01  # nats: weights that were lost, or never filled, give every token the same
AGAIN = 1e-4  # nats: the same batch read twice is the same to the bit on a CPU
ALONE = {"float32": 1e-3, "bfloat16": 0.05}  # nats, mean: another batch rounds otherwise
SURE = 2.33  # standard errors: one pair of a hundred equal models seems to differ by more, one-sided
EXCHANGED = 4.0  # times as far from the student on each other's prompts as on their own: two exchanged specialists
RUINED = 0.25  # of the student's accuracy: a teacher that has no more would unteach

Told = Iterator[Verdict]


def judge_pair(reading: Reading, settings: GateSettings, own: OpdSettings) -> list[Verdict]:
    return [
        *_random(reading),
        *_deterministic(reading),
        *_direct_forward(reading, own.train.precision),
        *_distance(reading, settings, own),
        *_entropy_gap(reading, settings),
        *_overlap(reading, settings, own),
        *_headroom(reading, settings, own),
    ]


def judge_routes(readings: Sequence[Reading]) -> list[Verdict]:
    """Are two teachers exchanged, both trained from the student? Silent where no two of them can be told apart.

    Such a specialist has moved away from the student on what it was trained on, so each of two exchanged ones has moved
    further on the other's prompts than the other has, and not just because it moved further everywhere. Measured with
    kimi_k3: 0.46 and 0.14 nats on their own prompts, 0.04 and 0.01 on each other's.
    """
    found = []
    for a, b in combinations(readings, 2):
        if a.teacher.path == b.teacher.path or not (a.moved and b.moved):
            continue
        on_a, on_b = b.moved[a.number] / _floor(a.moved[a.number]), a.moved[b.number] / _floor(b.moved[b.number])
        if min(on_a, on_b) >= EXCHANGED:
            found.append(
                Verdict(
                    "routing",
                    subject(a),
                    Outcome.REFUSE,
                    f"{b.teacher.label} is {on_a:.0f} times as far from the student as it on its prompts, and it "
                    f"{on_b:.0f} times as far as {b.teacher.label} on the prompts of that",
                    "each seems trained on what the other is asked about: exchange their routes",
                    {"on_its_own": on_a, "on_the_others": on_b},
                )
            )
    return found


def _floor(nats: float) -> float:
    return max(nats, 1e-6)


def subject(reading: Reading) -> str:
    return f"{reading.student} -> {reading.teacher.label}"


def _random(reading: Reading) -> Told:
    """Without what only repeats its predecessor: random weights with tied embeddings foresee that.

    A teacher is held against the student on the same tokens. After a few steps of training neither knows anything,
    which is no sign of other weights than were meant.
    """
    counted_N = ~reading.repeats_N
    told_N = reading.logprobs_N[counted_N]
    if not len(told_N):
        yield unasked("random_teacher", subject(reading), "the student wrote nothing, and no answer is known")
        return
    full = math.log(reading.vocabulary)
    known, own = float(told_N.quantile(KNOWN)), float(reading.student_N[counted_N].quantile(KNOWN))
    values = {"mean": float(told_N.mean()), "spread": float(told_N.std(correction=0)), "uniform": -full}
    evidence = (
        f"log-probabilities of {len(told_N)} tokens: mean {values['mean']:.3f}, standard deviation "
        f"{values['spread']:.3f}, nine tenths below {known:.3f}; -ln V is {-full:.3f}"
    )
    outcome, remedy = Outcome.GO, ""
    if not known >= BLIND * full:  # not a number: blind
        dead = not values["spread"] >= FLAT
        outcome = Outcome.REFUSE if dead or not known + full >= LESS * (own + full) else Outcome.WARN
        evidence += f" (of the student nine tenths lie below {own:.3f})"
        remedy = "it knows nothing of its own rows, as random weights do: name a trained checkpoint"
        remedy += f" ({reading.teacher.path})"
        if outcome is Outcome.WARN:
            remedy = "neither it nor the student knows anything of these rows: train them longer before it is to teach"
    yield Verdict("random_teacher", subject(reading), outcome, evidence, remedy, values)


def _deterministic(reading: Reading) -> Told:
    differs = reading.again > AGAIN
    yield Verdict(
        "deterministic",
        subject(reading),
        Outcome.REFUSE if differs else Outcome.GO,
        f"the same tokens read twice differ by up to {reading.again:.2g} nats (allowed: {AGAIN:g})",
        "a teacher that answers otherwise each time teaches noise: look for dropout, or for another model in its place"
        if differs
        else "",
        {"again": reading.again},
    )


def _direct_forward(reading: Reading, precision: str) -> Told:
    bound = ALONE[precision]
    differs = not reading.alone <= bound
    yield Verdict(
        "direct_forward",
        subject(reading),
        Outcome.REFUSE if differs else Outcome.GO,
        f"what the stage reads differs from one plain forward pass a sequence by {reading.alone:.2g} nats a token "
        f"(allowed in {precision}: {bound:g})",
        "with resources.teacher_states: direct it reads the model itself; if that differs too, its attention does not "
        "heed the mask of shared prefixes"
        if differs
        else "",
        {"alone": reading.alone},
    )


def _distance(reading: Reading, settings: GateSettings, own: OpdSettings) -> Told:
    kl, sure = reading.reverse_kl, reading.reverse_kl - 2 * reading.kl_error
    if not math.isfinite(kl):
        outcome, remedy = Outcome.REFUSE, "one of both gives no numbers: look at its weights"
    elif sure > settings.far:
        outcome, remedy = _too_far(own)
    elif sure > settings.near:
        outcome = Outcome.WARN
        remedy = "watch entropy and length in the first steps; a cold start on the teacher's answers brings them closer"
    else:
        outcome, remedy = Outcome.GO, ""
    yield Verdict(
        "distance",
        subject(reading),
        outcome,
        f"reverse KL of {kl:.3f} nats a token (standard error {reading.kl_error:.3f}) on {reading.rollouts} student "
        f"completions of {reading.tokens} tokens; near up to {settings.near:g}, far from {settings.far:g}",
        remedy,
        {"reverse_kl": kl, "error": reading.kl_error, "tokens": reading.tokens},
    )


def _too_far(own: OpdSettings) -> tuple[Outcome, str]:
    if own.sampled_by == "teacher":  # which is the cold start
        return Outcome.WARN, "the teacher's own samples are learned from; measure again before its student samples"
    return (
        Outcome.COLD_START,
        "fine-tune the student on this teacher's answers first (a stage of kind `sample`, then `sft`), or take a "
        "teacher trained from the student's checkpoint",
    )


def _entropy_gap(reading: Reading, settings: GateSettings) -> Told:
    gap = abs(reading.student_entropy - reading.teacher_entropy)
    wide = not gap <= settings.entropy_gap
    flatter = reading.teacher_entropy > reading.student_entropy
    yield Verdict(
        "entropy_gap",
        subject(reading),
        Outcome.WARN if wide else Outcome.GO,
        f"entropy of the student {reading.student_entropy:.3f} nats, of the teacher {reading.teacher_entropy:.3f}; a "
        f"gap of up to {settings.entropy_gap:g} is usual",
        ("" if not wide else "the student will grow less sure: " if flatter else "the student will lose its variety: ")
        + ("see that this is the teacher meant, and watch the entropy" if wide else ""),
        {"student": reading.student_entropy, "teacher": reading.teacher_entropy},
    )


def _overlap(reading: Reading, settings: GateSettings, own: OpdSettings) -> Told:
    """Two sets of k tokens at random share k / V of them, which matters where vocabularies are small."""
    share, chance = reading.overlap, reading.k / reading.vocabulary
    if share >= settings.overlap:
        outcome, remedy = Outcome.GO, ""
    elif share > (settings.overlap + chance) / 2 or chance >= settings.overlap:
        outcome, remedy = Outcome.WARN, "they prefer different words: expect slow progress, and watch `overlap` rise"
    else:
        outcome, remedy = _too_far(own)
    yield Verdict(
        "topk_overlap",
        subject(reading),
        outcome,
        f"{share:.2f} of the {reading.k} likeliest tokens are both's; {settings.overlap:g} or more is usual, "
        f"{chance:.2f} is chance",
        remedy,
        {"overlap": share, "chance": chance},
    )


def _headroom(reading: Reading, settings: GateSettings, own: OpdSettings) -> Told:
    mine, theirs = reading.student_score, reading.teacher_score
    evidence = f"right answers: teacher {theirs.right} of {theirs.asked}, student {mine.right} of {mine.asked}"
    values = {"teacher": theirs.right / theirs.asked, "student": mine.right / mine.asked}
    outcome, remedy, asked = Outcome.GO, "", True
    shortened = own.rollout.max_completion_tokens > settings.max_completion_tokens
    if shortened and max(mine.cut / mine.asked, theirs.cut / theirs.asked) > 0.5:
        evidence += f"; most were cut at gate.max_completion_tokens ({settings.max_completion_tokens}): not judged"
        asked = False
    elif worse_by(theirs, mine) > SURE:
        ruined = theirs.right <= RUINED * mine.right
        outcome = Outcome.REFUSE if ruined else Outcome.WARN
        evidence += f", worse by {worse_by(theirs, mine):.1f} standard errors"
        remedy = "is it the teacher of these prompts? See its route, its chat template and its own evaluation"
    yield Verdict("headroom", subject(reading), outcome, evidence, remedy, values, asked=asked)


def worse_by(a: Score, b: Score) -> float:
    """How far the accuracy of `a` lies below that of `b`, in standard errors of two equal proportions."""
    rate = (a.right + b.right) / (a.asked + b.asked)
    error = math.sqrt(rate * (1 - rate) * (1 / a.asked + 1 / b.asked))
    return (b.right / b.asked - a.right / a.asked) / error if error else 0.0
