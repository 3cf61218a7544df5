"""Failure drills: a fault at a place drawn from a fixed seed, a run to the end, and nothing may be lost.

    pipelines.py  what is run: SFT, two specialists, distillation, evaluation, on a toy trainer and on the real engine
    faults.py     the kinds of faults, how many of each, and the drills that the seed draws from them
    inject.py     how each kind is brought about
    family.py     the processes of a run, by their roles
    shim.c        in the processes of a run: the n-th call on a file fails, or the clock jumps
    survival.py   what must hold afterwards
    report.py     docs/drills.md

`make drills` runs them all, `make drills ONLY=17` one of them.
"""
