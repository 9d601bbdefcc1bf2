"""What the gates of heads do: to which inputs they give how much, and what each head looks at."""

from vit_prune.analysis.gates.record import GateRecord, collect

__all__ = ["GateRecord", "collect"]
