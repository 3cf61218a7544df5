"""The command line: the only part of opdctl that prints and exits. Thin over the Python API."""

from opdctl.cli.app import app, main

__all__ = ["app", "main"]
