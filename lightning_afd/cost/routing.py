"""How many copies of a token travel, and how uneven the load of the experts' ranks is.

A token chooses K of E experts, all choices alike (the auxiliary losses aim at that).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cache


@cache
def visits(part: int, experts: int, top_k: int) -> float:
    """Probability that a token chooses at least one of `part` of the experts.

    1 - C(E - part, K) / C(E, K): K different experts are drawn without putting one back. With it, n equal parts give
    the approximation n (1 - (1 - 1/n)^K) for the sum over all of them.
    """
    misses = 1.0
    for drawn in range(top_k):
        misses *= max(0, experts - part - drawn) / (experts - drawn)
    return 1.0 - misses


def expected_copies(parts: Iterable[int], experts: int, top_k: int) -> float:
    """Distinct parts (F ranks, or nodes) that a token visits on average, where `parts` own so many experts each."""
    return sum(visits(part, experts, top_k) for part in parts)


def sampling_imbalance(tokens: float, experts: int, top_k: int, ranks: int) -> float:
    """Rows of the busiest of N equal ranks over the mean, where routing is balanced and only chance is at work.

    The largest of N nearly normal counts lies sqrt(2 ln N) standard deviations above the mean; one token's number of
    experts on a rank is hypergeometric. An estimate from above for few tokens.
    """
    share = 1 / ranks
    if ranks < 2 or experts < 2:
        return 1.0
    variance = top_k * share * (1 - share) * (experts - top_k) / (experts - 1)
    return 1.0 + math.sqrt(2 * math.log(ranks) * variance / tokens) / (top_k * share)
