"""Latency as a ratio, paired in one process: the candidates take turns (A B A B), so that drift hits them alike."""

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

MS_PER_SECOND = 1_000


@dataclass(frozen=True)
class Ratio:
    """Median of the per-round ratios and an interval that holds the true median with probability `coverage`, whatever the distribution."""

    median: float
    low: float
    high: float
    coverage: float


@dataclass(frozen=True)
class PairedLatency:
    """times_ms: milliseconds per candidate, one per round; round i of one candidate ran next to round i of the others."""

    times_ms: dict[str, tuple[float, ...]]

    @property
    def medians_ms(self) -> dict[str, float]:
        return {name: statistics.median(times) for name, times in self.times_ms.items()}

    def ratio(self, a: str, b: str) -> Ratio:
        """Median over the rounds of time(a) / time(b): how many times faster b is.

        The interval comes from order statistics (the sign test): with n sorted ratios, the k-th smallest and the k-th largest, for the
        largest k that still covers 95 %. It draws no random numbers. Fewer than 6 rounds cannot reach 95 %: smallest to largest then.
        """
        ratios = sorted(x / y for x, y in zip(self.times_ms[a], self.times_ms[b], strict=True))
        k = max(1, sign_test_rank(len(ratios), 0.95))
        return Ratio(statistics.median(ratios), ratios[k - 1], ratios[-k], _coverage(len(ratios), k))

    def to_dict(self) -> dict:
        """JSON-able; the ratios are against the first candidate: above 1 is faster."""
        first = next(iter(self.times_ms))
        return {
            "times_ms": {name: list(times) for name, times in self.times_ms.items()},
            "medians_ms": self.medians_ms,
            "speedups": {name: asdict(self.ratio(first, name)) for name in self.times_ms},
        }


def paired_latency(
    candidates: Mapping[str, Callable[[], object]],
    *,
    runs: int,
    warmup: int,
    synchronize: Callable[[], object] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> PairedLatency:
    """Time each candidate once per round, in turn.

    Args:
        candidates: name -> call without arguments, e.g. {"dense": lambda: dense(images), "pruned": lambda: pruned(images)}.
        runs: rounds that are timed. warmup: rounds before them that are not, for compilation, caches and lazy initialisation.
        synchronize: waits until the device has finished, called before and after each timed call; None where calls do not return early.
        clock: seconds.

    Raises: ValueError for no candidate, runs < 1 or warmup < 0.
    """
    if not candidates or runs < 1 or warmup < 0:
        raise ValueError(f"need a candidate, runs >= 1 and warmup >= 0, got {len(candidates)} candidates, runs={runs}, warmup={warmup}")
    synchronize = synchronize or (lambda: None)
    times_ms = {name: [] for name in candidates}
    for round_index in range(warmup + runs):
        for name, call in candidates.items():
            synchronize()
            start = clock()
            call()
            synchronize()
            if round_index >= warmup:
                times_ms[name].append((clock() - start) * MS_PER_SECOND)
    return PairedLatency({name: tuple(times) for name, times in times_ms.items()})


def sign_test_rank(num_ratios: int, confidence: float) -> int:
    """Largest k for which the k-th smallest and k-th largest of n values hold the median with that confidence; 0 where none does."""
    k = 0
    while k < num_ratios // 2 and _coverage(num_ratios, k + 1) >= confidence:
        k += 1
    return k


def _coverage(num_ratios: int, k: int) -> float:
    """P(k <= Binomial(n, 1/2) <= n - k)."""
    return sum(math.comb(num_ratios, below) for below in range(k, num_ratios - k + 1)) / 2**num_ratios
