"""Texts with labels: read (`files.py`, `disk.py`), numbered by class (`labels.py`), cut into tokens (`tokenizer.py`), put into batches (`texts.py`)."""
