"""Evaluate text encoders side by side: accuracy beside what each text costs at its own length, with its own heads."""
