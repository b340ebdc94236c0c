"""Settings or a checkpoint, ours or the original toolkit's -> the networks that a model consists of."""
