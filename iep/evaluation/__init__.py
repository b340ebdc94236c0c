"""Scores of answers and programs, and the files that an evaluation leaves."""
