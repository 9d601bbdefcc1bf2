"""Latency as a ratio, paired in one process: the candidates take turns (A B A B), so that drift hits them alike."""

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

from vit_prune.measure.clock import MS_PER_SECOND, Clock, HostClock

CONFIDENCE = 0.95
WIDEST_INTERVAL = 0.05  # of a ratio, as a share of its median
WIDEST_SPREAD = 1.5  # p90 / p10 of one candidate
FEWEST_RUNS = 6  # fewer have no interval that reaches CONFIDENCE


@dataclass(frozen=True)
class Ratio:
    """Median of the per-round ratios and an interval that holds the true median with probability `coverage`, whatever the distribution."""

    median: float
    low: float
    high: float
    coverage: float

    @property
    def width(self) -> float:
        """Of the interval, as a share of the median."""
        return (self.high - self.low) / self.median


@dataclass(frozen=True)
class Summary:
    """Milliseconds of one candidate. std_ms is the sample's standard deviation, None of one run; p10 and p90 are interpolated."""

    mean_ms: float
    std_ms: float | None
    median_ms: float
    p10_ms: float
    p90_ms: float

    def throughput(self, batch_size: int) -> float:
        """Images (or whatever a batch is of) per second, by the median."""
        return batch_size * MS_PER_SECOND / self.median_ms


@dataclass(frozen=True)
class PairedLatency:
    """times_ms: milliseconds per candidate, one per round; round i of one candidate ran next to round i of the others."""

    times_ms: dict[str, tuple[float, ...]]

    @property
    def medians_ms(self) -> dict[str, float]:
        return {name: statistics.median(times) for name, times in self.times_ms.items()}

    def summary(self, name: str) -> Summary:
        times = self.times_ms[name]
        if len(times) == 1:
            return Summary(times[0], None, times[0], times[0], times[0])
        deciles = statistics.quantiles(times, n=10, method="inclusive")
        return Summary(statistics.fmean(times), statistics.stdev(times), statistics.median(times), deciles[0], deciles[-1])

    def ratio(self, a: str, b: str) -> Ratio:
        """Median over the rounds of time(a) / time(b): how many times faster b is.

        The interval comes from order statistics (the sign test): with n sorted ratios, the k-th smallest and the k-th largest, for the
        largest k that still covers 95 %. It draws no random numbers. Fewer than 6 rounds cannot reach 95 %: smallest to largest then.
        """
        ratios = sorted(x / y for x, y in zip(self.times_ms[a], self.times_ms[b], strict=True))
        k = max(1, sign_test_rank(len(ratios), CONFIDENCE))
        return Ratio(statistics.median(ratios), ratios[k - 1], ratios[-k], _coverage(len(ratios), k))

    def noise(self, a: str, b: str) -> str | None:
        """Why ratio(a, b) says little, in one sentence; None where it can be trusted.

        The rule: at least 6 rounds, an interval of at most 5 % of the ratio, and p90 of either candidate at most 1.5 times its p10.
        """
        if len(self.times_ms[a]) < FEWEST_RUNS:
            return f"{len(self.times_ms[a])} runs are too few to tell: at least {FEWEST_RUNS} give a 95 % interval"
        ratio = self.ratio(a, b)
        if ratio.width > WIDEST_INTERVAL:
            return f"the machine was too noisy to tell: the speedup of {b} lies between {ratio.low:.3f} and {ratio.high:.3f}"
        for summary, name in ((self.summary(a), a), (self.summary(b), b)):
            if summary.p90_ms > WIDEST_SPREAD * summary.p10_ms:
                return f"the machine was too noisy to tell: p10 and p90 of {name} are {summary.p10_ms:.3g} and {summary.p90_ms:.3g} ms"
        return None

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
    clock: Clock | None = None,
    after_round: Callable[[], object] | None = None,
) -> PairedLatency:
    """Time each candidate once per round, in turn.

    Who begins a round may meet what happened since the last one (a progress bar, the garbage collector). So each candidate begins an equal
    share of the rounds: A B A B, and from the middle on B A B A. Another beginner in every round (A B B A) would let a candidate run straight
    after itself, on caches that it warmed, in some rounds and not in others: two groups of ratios, and a median that falls between them.

    Args:
        candidates: name -> call without arguments, e.g. {"dense": lambda: dense(images), "pruned": lambda: pruned(images)}.
        runs: rounds that are timed. warmup: rounds before them that are not, for compilation, caches and lazy initialisation.
        clock: times one call, see `clock_for(device)`; None is the host's, for devices on which calls do not return early.
        after_round: called between the rounds, outside of what is timed.

    Raises: ValueError for no candidate, runs < 1 or warmup < 0.
    """
    if not candidates or runs < 1 or warmup < 0:
        raise ValueError(f"need a candidate, runs >= 1 and warmup >= 0, got {len(candidates)} candidates, runs={runs}, warmup={warmup}")
    clock = clock or HostClock()
    names = list(candidates)
    times_ms = {name: [] for name in names}
    for round_index in range(-warmup, runs):
        first = max(0, round_index) * len(names) // runs
        for name in names[first:] + names[:first]:
            elapsed_ms = clock.time_ms(candidates[name])
            if round_index >= 0:
                times_ms[name].append(elapsed_ms)
        if after_round is not None:
            after_round()
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
