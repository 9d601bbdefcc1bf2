"""Floor 4: MACs, latency and memory."""
