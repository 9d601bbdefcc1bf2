"""Floor 2: one method = one file = one frozen config and one module."""
