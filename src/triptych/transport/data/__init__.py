"""The data plane: staged tensors are pulled by their receiver, by the best way that both ends have."""
