"""Question tokens -> program tokens: an LSTM encoder and decoder, greedy, sampled and beam decoding."""
