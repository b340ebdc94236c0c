"""Preprocessed HDF5 files -> batches of questions and features, in the order that training uses."""
