"""The patterns of an LSTM, a GRU and a plain RNN of many nodes, which are matched backwards from the last node."""
