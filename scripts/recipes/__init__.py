"""Runs the packaged recipes and writes down what came of them: `python -m scripts.recipes`, or `make recipes`."""
