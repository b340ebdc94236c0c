"""Batching of many small tree-shaped networks: graph -> schedule -> plan -> execute, and a slow reference.

The package is independent of CLEVR. It imports torch, numpy, the standard library and itself. Import from its modules:
`graph`, `schedulers`, `sharing`, `plan`, `execute`, `placement`, `reference`.
"""
