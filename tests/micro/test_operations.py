"""The operations of a round and of training, by what they grow with.

An ordinary test run does each once. `make micro` times them and compares with the committed
baseline (`growth.py`).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy
import pytest
import torch
from transformers import DynamicCache, LogitsProcessorList

from hf_paradraft.decoding.accept import Greedy, accept
from hf_paradraft.decoding.cache import RaggedCache
from hf_paradraft.decoding.tree_attention import TreeAttention, tree_shape
from hf_paradraft.decoding.trees import best_first_tree
from hf_paradraft.training.rows import cod_keep_mask, parallel_draft_rows


@dataclass(frozen=True)
class Sizes:
    """Nodes of a tree, its depth, the vocabulary, rows of a batch, tokens of context."""

    N: int = 16
    K: int = 8
    V: int = 32_768
    batch: int = 1
    context: int = 1024


def tree_building(sizes: Sizes) -> Callable[[], object]:
    torch.manual_seed(0)
    logits = 3 * torch.randn(sizes.batch, sizes.K, sizes.V)
    return lambda: [best_first_tree(row, sizes.N) for row in logits]


def acceptance(sizes: Sizes) -> Callable[[], object]:
    """Greedy, down a tree whose longest path is all right."""
    torch.manual_seed(0)
    draft = best_first_tree(3 * torch.randn(sizes.K, sizes.V), sizes.N)
    logits = torch.randn(sizes.batch, sizes.N + 1, sizes.V)
    node = -1
    while children := draft.children(node):
        logits[:, node + 1, draft.token_ids[children[0]]] = 100.0
        node = children[0]
    buffer = torch.zeros(sizes.batch, sizes.context + sizes.N + 2, dtype=torch.long)

    def run() -> None:
        for row in range(sizes.batch):
            for _ in accept(
                draft,
                logits[row],
                buffer[row : row + 1],
                sizes.context,
                LogitsProcessorList(),
                Greedy(),
            ):
                pass

    return run


def tree_masks(sizes: Sizes) -> Callable[[], object]:
    """Left-padded rows, so that no mask can be left out."""
    prompts = torch.ones(sizes.batch, sizes.context)
    prompts[:, 0] = 0
    attention = TreeAttention(
        {"full_attention": None},
        prompts,
        torch.full((sizes.batch,), sizes.context - 2),
        torch.float32,
        torch.device("cpu"),
    )
    draft = best_first_tree(torch.randn(sizes.K, 256), sizes.N)

    def run() -> object:
        sees, depths = tree_shape(draft.parents, sizes.N + 1)
        every = numpy.stack([sees] * sizes.batch), numpy.stack([depths] * sizes.batch)
        return attention.inputs([sizes.context] * sizes.batch, *every)

    return run


def kept_path(sizes: Sizes) -> Callable[[], object]:
    """Every other new entry of 16 layers is kept, then put back."""
    cache = DynamicCache()
    for layer in range(16):
        cache.update(*torch.randn(2, sizes.batch, 4, sizes.context + sizes.N, 64), layer)
    ragged = RaggedCache(cache, sizes.batch, sizes.context)
    full = [(layer.keys, layer.values) for layer in cache.layers]
    paths = [list(range(0, sizes.N, 2))] * sizes.batch

    def run() -> None:
        ragged.keep(paths, sizes.N)
        ragged.lengths = [sizes.context] * sizes.batch
        for layer, (keys, values) in zip(cache.layers, full, strict=True):
            layer.keys, layer.values = keys, values

    return run


def training_rows(sizes: Sizes) -> Callable[[], object]:
    """The rows of one text with its dense mask, whose size is the square of theirs."""
    ids = torch.zeros(sizes.context, dtype=torch.long)

    def run() -> object:
        keep = cod_keep_mask(sizes.context, sizes.K, 0.7, 0.2, torch.Generator().manual_seed(0))
        return parallel_draft_rows(ids, ids, 4, keep)

    return run


def reference(sizes: Sizes) -> Callable[[], object]:
    """What all times are divided by: a hundred small tensor operations."""
    x = torch.zeros(1024)

    def run() -> None:
        for _ in range(100):
            x.add_(1.0)

    return run


GROWTH = {
    tree_building: {"N": (8, 16, 32, 64, 128), "K": (2, 4, 8, 16), "V": (2048, 8192, 32_768,
    131_072), "batch": (1, 4, 16)},
    acceptance: {"N": (8, 16, 32, 64, 128), "K": (2, 4, 8, 16), "V": (2048, 8192, 32_768, 131_072),
    "batch": (1, 4, 16),
                 "context": (256, 1024, 4096, 16_384)},
    tree_masks: {"N": (8, 16, 32, 64, 128), "batch": (1, 4, 16), "context": (256, 1024, 4096,
    16_384)},
    kept_path: {"N": (8, 16, 32, 64, 128), "batch": (1, 4, 16), "context": (256, 1024, 4096,
    16_384)},
    training_rows: {"K": (2, 4, 8, 16), "context": (128, 256, 512, 1024)},
}  # fmt: skip


def cases() -> Iterator:
    yield pytest.param(reference, Sizes(), "", 0, id="reference")
    for operation, dimensions in GROWTH.items():
        for dimension, values in dimensions.items():
            for value in values:
                sizes = replace(Sizes(), **{dimension: value})
                yield pytest.param(
                    operation,
                    sizes,
                    dimension,
                    value,
                    id=f"{operation.__name__}-{dimension}-{value}",
                )


@pytest.mark.parametrize(("operation", "sizes", "dimension", "value"), list(cases()))
def test_operation(benchmark, operation, sizes, dimension, value):
    benchmark.extra_info.update(operation=operation.__name__, dimension=dimension, value=value)
    benchmark(operation(sizes))
