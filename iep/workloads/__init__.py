"""Networks besides CLEVR's that `iep.batching` runs: trees, sentences and mixtures of experts."""
