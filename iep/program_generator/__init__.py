"""Question tokens -> program tokens by an LSTM encoder and decoder, with greedy, sampled and beam decoding."""
