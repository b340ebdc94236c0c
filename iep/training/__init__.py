"""Settings and preprocessed data -> checkpoints and records of a run: one loop, one task per model."""
