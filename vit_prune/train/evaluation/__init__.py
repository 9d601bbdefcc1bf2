"""Evaluate checkpoints, one or several, at one keep schedule or several."""
