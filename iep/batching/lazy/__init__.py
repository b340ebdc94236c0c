"""The lazy scope: code for one sample -> recorded calls -> graph, kernels and values, run batched by `iep.batching`.

`scope.py` is the front, `future.py` what users hold, `recording.py` what is noted; `lowering.py` makes a graph of it,
`kernels.py` and `direct.py` what its ops run.
"""
