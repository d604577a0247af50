"""A quantity over time in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


class Timeline:
    """Points (Unix time, value from then on, most within); neighbours are merged when there are too many."""

    MOST = 1024

    def __init__(self) -> None:
        self.points: list[tuple[float, int, int]] = []

    def note(self, now: float, value: int) -> None:
        """Time never runs backwards here: a clock that was set back counts as standing still."""
        points = self.points
        if points and now <= points[-1][0]:
            then, _, most = points[-1]
            points[-1] = (then, value, max(most, value))
            return
        points.append((now, value, value))
        if len(points) > self.MOST:
            self.points = [_merged(points[i : i + 2]) for i in range(0, len(points), 2)]

    def __iter__(self) -> Iterator[tuple[float, int, int]]:
        return iter(self.points)

    def __len__(self) -> int:
        return len(self.points)


def _merged(pair: Sequence[tuple[float, int, int]]) -> tuple[float, int, int]:
    return (pair[0][0], pair[-1][1], max(most for _, _, most in pair))
