"""Answers to questions about one image, and pictures of how they came about."""
