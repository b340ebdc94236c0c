"""Settings, or a checkpoint of this or the original toolkit -> the networks of a model."""
