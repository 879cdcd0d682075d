"""Numbers of success: intervals for a share, and the exact test of two policies on the same trials."""

from __future__ import annotations

import math
from dataclasses import dataclass

# Two-sided 95 percent of the normal distribution.
Z_95 = 1.959963984540054


@dataclass(frozen=True)
class Share:
    """Successes of trials, with the 95 percent Wilson score interval (Wilson 1927; both ends stay within [0, 1])."""

    successes: int
    trials: int

    @property
    def value(self) -> float:
        """Share of successes; nan without trials."""
        return self.successes / self.trials if self.trials else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        """95 percent Wilson interval; (0, 1) without trials."""
        n = self.trials
        if n == 0:
            return 0.0, 1.0
        share, z2 = self.value, Z_95 * Z_95
        centre = (share + z2 / (2 * n)) / (1 + z2 / n)
        half = Z_95 * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n)) / (1 + z2 / n)
        # At 0 and n successes one end is exact; the formula leaves 1e-17 there.
        low = 0.0 if self.successes == 0 else max(0.0, centre - half)
        return low, 1.0 if self.successes == n else min(1.0, centre + half)

    def __str__(self) -> str:
        low, high = self.interval
        if not self.trials:
            return "unknown (no trial has ended)"
        return f"{self.value:.0%} ({low:.0%} to {high:.0%}, {self.successes}/{self.trials})"


@dataclass(frozen=True)
class PairedTest:
    """Exact McNemar test of a new policy against a reference on the same trials.

    gained: only the new one succeeded; lost: only the reference did. Equal outcomes say nothing.
    """

    gained: int
    lost: int
    trials: int

    @property
    def p_worse(self) -> float:
        """Probability of at least `lost` losses among the differing trials if both were equally good (one-sided)."""
        return binomial_tail(self.lost, self.gained + self.lost)

    @property
    def p_better(self) -> float:
        """The same for the gains."""
        return binomial_tail(self.gained, self.gained + self.lost)


def binomial_tail(least: int, n: int) -> float:
    """P(X >= least) for X ~ Binomial(n, 1/2), exactly."""
    return sum(math.comb(n, k) for k in range(least, n + 1)) / 2**n
