"""Guessed tokens that a drafter has read behind the text, and what each of them sees."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import BoolTensor, LongTensor


@dataclass
class Node:
    """One of them.

    Attributes:
        token: its id.
        parent: index into the row's nodes, -1 for the text's last token.
        column: where its entries stand in the cache, behind the longest row's end.
        depth: 0 for a child of the text's last token.
    """

    token: int
    parent: int
    column: int
    depth: int


class Nodes:
    """Of each row, what was read behind its text; columns are shared by all rows.

    Args:
        num_rows: B.
    """

    def __init__(self, num_rows: int):
        self.rows: list[list[Node]] = [[] for _ in range(num_rows)]
        self.columns = 0  # of the cache that these take

    def add(
        self, tokens: Sequence[LongTensor], parents: Sequence[Sequence[int]], least: int = 0
    ) -> tuple[BoolTensor, LongTensor]:
        """Take more nodes, as `Extend` gets them, padded to `least`.

        Returns:
            What each new one sees of all columns, bool `(B, M, C)`, padding itself alone; and how deep each column stands,
            int64 `(B, C)`.
        """
        size = max(least, *map(len, tokens))
        columns = self.columns + size
        sees = torch.zeros((len(tokens), size, columns), dtype=torch.bool)
        depths = torch.zeros((len(tokens), columns), dtype=torch.long)
        sees[:, range(size), range(self.columns, columns)] = True  # padding sees itself: no empty softmax
        for row, (nodes, new, above) in enumerate(zip(self.rows, tokens, parents, strict=True)):
            begin = len(nodes)
            for place, (token, parent) in enumerate(zip(new.tolist(), above, strict=True)):
                nodes.append(Node(token, parent, self.columns + place, 0 if parent < 0 else nodes[parent].depth + 1))
            for index, node in enumerate(nodes):
                depths[row, node.column] = node.depth
                while index >= begin and node.parent >= 0:
                    node = nodes[node.parent]
                    sees[row, index - begin, node.column] = True
        self.columns = columns
        return sees, depths

    def path(self, row: int, tokens: Sequence[int]) -> list[int]:
        """Columns of the nodes that `tokens`, in a row behind the text, have become."""
        found: list[int] = []
        last = -1
        for token in tokens:
            nodes = self.rows[row]
            match = next((i for i, node in enumerate(nodes) if node.parent == last and node.token == token), None)
            if match is None:
                break
            found.append(nodes[match].column)
            last = match
        return found


def ragged_rows(padding: LongTensor, size: int) -> tuple[BoolTensor, LongTensor]:
    """New tokens, and masks behind, of texts that end alike: each sees what is before it in its text; padding, only itself.

    Args:
        padding: int64 `(B, 1)`, how many of the rows stand before each text's first.
        size: M.

    Returns:
        What the rows see of each other, bool `(B, M, M)`, and how deep they stand, int64 `(B, M)`, as `TreeAttention` takes them.
    """
    depths = torch.arange(size, device=padding.device) - padding
    itself = torch.eye(size, dtype=torch.bool, device=padding.device)
    return ((depths[:, None] >= 0) & (depths[:, None] <= depths[:, :, None])) | itself, depths.clamp(min=0)
