"""A streamer that is told of rounds, and not only of tokens."""

from __future__ import annotations

from abc import abstractmethod

from ..names import BaseStreamer


class RoundStreamer(BaseStreamer):
    """A streamer that gets each round as one; any other gets the tokens one by one, as in plain decoding.

    `put` gets the prompt, as from plain decoding, and nothing else.
    """

    @abstractmethod
    def put_round(self, tokens: list[int], num_accepted: int) -> None:
        """Take a round's new tokens, of which the first `num_accepted` were drafted."""
