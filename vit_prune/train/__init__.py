"""Floor 4: Data, the training loop and its state."""
