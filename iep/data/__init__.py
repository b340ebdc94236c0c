"""Preprocessed HDF5 files -> batches of questions and features, in the order in which training sees them."""
