"""A CLEVR directory -> vocab.json, {split}_features.h5 and {split}_questions.h5, which training reads."""
