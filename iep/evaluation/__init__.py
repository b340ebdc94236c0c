"""Checkpoints and a preprocessed split -> scores of answers and programs, in files, a table and an HTML page."""
