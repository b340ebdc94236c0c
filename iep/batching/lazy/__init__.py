"""The lazy scope: code for one sample -> recorded calls -> graph, kernels and values, run batched by `iep.batching`.

`scope.py` is the front, `future.py` what users hold, `recording.py` what is noted, with `noted.py` on what must not
change until it runs; `trial.py` finds out what a call returns; `lowering.py` makes a graph of all, `kernels.py` and
`direct.py` what its ops run.
"""
