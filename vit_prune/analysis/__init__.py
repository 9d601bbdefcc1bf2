"""Floor 4: What a pruned model does: pictures and fidelity tables."""
