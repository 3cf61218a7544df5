"""Runs held against each other, and what a stage did and cost: plain data from what is on disk."""

from opdctl.comparison.blocks import COSTS, HEALTH, Block, Comparison, Row, Student, Value, compare
from opdctl.comparison.costs import Ledger
from opdctl.comparison.history import Curve, curves

__all__ = [
    "COSTS",
    "HEALTH",
    "Block",
    "Comparison",
    "Curve",
    "Ledger",
    "Row",
    "Student",
    "Value",
    "compare",
    "curves",
]
