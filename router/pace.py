"""How fast a worker prefills, learned from its answers: seconds = fixed + computed tokens x seconds_per_token.

A worker computes one prompt after another, or several at once at the same total rate. What one prompt took is therefore
the time since it came or since the worker's last answer, whichever is later.
"""

from __future__ import annotations

_MEMORY = 0.97  # share of the past that is kept at each sample
_FEW = 4  # samples
_GUESS_PER_TOKEN, _GUESS_FIXED = 1e-4, 2e-3  # seconds, before anything is known
_SPREAD = 64.0**2  # tokens²: prompts that differ by less tell nothing of the cost of a token
_MEMORY_OF_FETCHES = 0.8


class Pace:
    """Decayed sums over samples (tokens, seconds), for a straight line through them."""

    __slots__ = ("_n", "_s", "_t", "_ts", "_tt", "fixed", "per_fetched_token", "per_token", "samples")

    def __init__(self) -> None:
        self.samples = 0
        self.per_token, self.fixed = _GUESS_PER_TOKEN, _GUESS_FIXED
        self.per_fetched_token: float | None = None  # seconds a token that came from another tier
        self._n = self._t = self._s = self._tt = self._ts = 0.0

    @property
    def known(self) -> bool:
        return self.samples >= _FEW

    def observe(self, tokens: int, seconds: float) -> None:
        """`tokens` were computed in `seconds`."""
        keep = _MEMORY
        self.samples += 1
        self._n = self._n * keep + 1
        self._t = self._t * keep + tokens
        self._s = self._s * keep + seconds
        self._tt = self._tt * keep + tokens * tokens
        self._ts = self._ts * keep + tokens * seconds
        if self._t <= 0:
            self.fixed = self._s / self._n
            return
        mean_t, mean_s = self._t / self._n, self._s / self._n
        variance = self._tt / self._n - mean_t * mean_t
        covariance = self._ts / self._n - mean_t * mean_s
        through_zero = mean_s / mean_t
        slope = (covariance + _SPREAD * through_zero) / (variance + _SPREAD)
        self.per_token = min(max(slope, 0.05 * through_zero), through_zero)
        self.fixed = mean_s - self.per_token * mean_t

    def observe_fetch(self, tokens: int, seconds: float) -> None:
        """`tokens` came from host memory or the pool, in `seconds`."""
        rate = max(0.0, seconds) / tokens
        before = rate if self.per_fetched_token is None else self.per_fetched_token
        self.per_fetched_token = before * _MEMORY_OF_FETCHES + rate * (1 - _MEMORY_OF_FETCHES)

    def seconds(self, tokens: float) -> float:
        return self.fixed + tokens * self.per_token
