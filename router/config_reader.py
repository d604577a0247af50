"""Typed reads from a YAML mapping that note every problem with its path and go on with the default."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvstore.protocol import split_address


class Reader:
    """One mapping. Blocks inside it share its lists of problems and warnings. A null counts as absent."""

    def __init__(self, path: str, values: Mapping[str, Any], parent: Reader | None = None) -> None:
        self.path = path
        self.values = dict(values)
        self.problems: list[tuple[str, str]] = parent.problems if parent else []
        self.warnings: list[str] = parent.warnings if parent else []

    def at(self, key: str) -> str:
        return f"{self.path}.{key}" if self.path else key

    def problem(self, key: str, message: str) -> None:
        self.problems.append((self.at(key), message))

    def warn(self, key: str, message: str) -> None:
        self.warnings.append(f"{self.at(key)}: {message}")

    def close(self, name: str, allowed: Sequence[str]) -> None:
        """Unknown keys of this block are problems."""
        for key in self.values:
            if key not in allowed:
                self.problem(str(key), f"Key {key} not found in {name}; known keys: {', '.join(allowed)}")

    def block(self, key: str) -> Reader | None:
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            self.problem(key, f"{value!r} is not a mapping of keys")
            return None
        return Reader(self.at(key), value, self)

    def boolean(self, key: str, default: bool) -> bool:
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.problem(key, f"must be a boolean, got {value!r}")
            return default
        return value

    def integer(self, key: str, default: int, low: int) -> int:
        value = self.integer_or_none(key, default, low)
        return default if value is None else value

    def integer_or_none(self, key: str, default: int | None, low: int = 1) -> int | None:
        value = self.values.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            self.problem(key, f"must be a whole number of at least {low}, got {value!r}")
            return default
        return value

    def number(self, key: str, default: float) -> float:
        value = self.values.get(key)
        if isinstance(value, str):  # YAML 1.1 reads "1e3" and "inf" as text
            try:
                value = float(value)
            except ValueError:
                pass
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
            self.problem(key, f"must be a number of at least 0, got {value!r}")
            return default
        return float(value)

    def text(self, key: str, default: str) -> str:
        return self.text_or_none(key, default) or default

    def text_or_none(self, key: str, default: str | None) -> str | None:
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, str):
            self.problem(key, f"must be text, got {value!r}")
            return default
        return value

    def choice(
        self, key: str, default: str, allowed: Sequence[str], not_built: Sequence[str] = (), what: str | None = None
    ) -> str:
        value = self.values.get(key)
        if value is None:
            return default
        if value in allowed:
            return str(value)
        kind = what or key
        supported = f"Supported {kind}s are: [{', '.join(allowed)}]"
        if value in not_built:
            self.problem(key, f"{kind} {value} is not in this build. {supported}")
        else:
            self.problem(key, f"Unsupported {kind}: {value}. {supported}")
        return default

    def addresses(self, key: str) -> list[tuple[str, int]]:
        """A list of host:port, with or without http://."""
        value = self.values.get(key)
        if value is None:
            return []
        if not isinstance(value, list):
            self.problem(key, f"must be a list of host:port, got {value!r}")
            return []
        found = []
        for place, entry in enumerate(value):
            try:
                found.append(split_address(entry if isinstance(entry, str) else repr(entry)))
            except ValueError as error:
                self.problem(f"{key}[{place}]", str(error))
        return found
