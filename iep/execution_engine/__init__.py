"""The execution engine: programs and image features -> answers, with the modules of a minibatch run in batches."""
