"""What a round costs here: the measured forward, and what rounds were seen to take beyond it."""

from weakref import WeakKeyDictionary

import numpy
from transformers import PreTrainedModel

from .latency import RowLatency, row_latency

DECAY = 0.995  # of a round's weight with each later round
DOUBTED_ROWS = 256  # a slope over rows counts for nothing while they vary (squared, summed) by much less than this
OUTLIER = (
    4.0  # times the table's seconds is the most that a round is believed to take beyond them, and a fourth of them the least
)


class RoundCost:
    """Seconds of verifying and accepting, by the rows of a prompt; the drafter's time is not in it.

    A line through what rounds took beyond the table is added to the table: masks, acceptance, a longer text, a slower machine.

    Args:
        latency: of the target's forward.
        batch_size: prompts answered together.
    """

    def __init__(self, latency: RowLatency, batch_size: int = 1):
        self.latency, self.batch_size = latency, batch_size
        self.sums = numpy.zeros(5)  # decayed, of 1, x, y, x², xy: rows, and the seconds beyond the table's

    def __call__(self, rows: numpy.ndarray) -> numpy.ndarray:
        """Expected seconds with so many rows of each prompt."""
        rows = self.batch_size * rows
        count, x, y, xx, xy = self.sums
        expected = self.latency(rows)
        if count == 0:
            return expected
        slope = max(0.0, (xy - x * y / count) / (xx - x * x / count + DOUBTED_ROWS))
        return numpy.maximum(expected + y / count + slope * (rows - x / count), expected / OUTLIER)

    def observe(self, rows: int, seconds: float) -> None:
        """Learn from a round with so many rows of each prompt."""
        rows = self.batch_size * rows
        expected = float(self.latency(rows))
        more = min(seconds - expected, OUTLIER * expected)
        self.sums = DECAY * self.sums + (1, rows, more, rows * rows, rows * more)


_known: WeakKeyDictionary[PreTrainedModel, dict[tuple, RoundCost]] = WeakKeyDictionary()


def round_cost(model: PreTrainedModel, batch_size: int) -> RoundCost:
    """The costs of this model with this batch size, which all its calls share: one answer has too few rounds to learn from."""
    latency = row_latency(model)
    costs = _known.setdefault(model, {})
    return costs.setdefault((batch_size, *latency.seconds), RoundCost(latency, batch_size))
