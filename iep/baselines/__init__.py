"""Baselines, which answer questions without programs. Some of them read image features."""
