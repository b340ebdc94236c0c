"""The program generator: question tokens to program tokens."""
