"""Drafting by a reader: its rows join and leave with the calls whose texts they hold."""

from typing import Any

from ..protocol import Drafting


class ReadingDrafting(Drafting):
    """One call's drafting by one reader.

    Attributes:
        reader: an `LmReader` or a `FeatureReader`.
    """

    reader: Any

    def join(self, other: Drafting) -> bool:
        """Implement `Drafting.join`."""
        return type(other) is type(self) and self.reader.join(other.reader)

    def select(self, rows: list[int]) -> None:
        """Implement `Drafting.select`."""
        self.reader.select(rows)
