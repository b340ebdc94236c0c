"""Programs and images' features -> answers: the modules of a minibatch's programs, run batched."""
