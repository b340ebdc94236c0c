"""The execution engine: programs' modules over images' features, batched over a minibatch of programs."""
