"""Experiments of published papers on top of `iep`, and measurements of the toolkit: `python -m benchmarks --help`."""
