"""Training: one loop, one task per model, checkpoints."""
