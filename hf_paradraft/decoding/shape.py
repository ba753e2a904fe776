"""From guesses to drafts: which tokens are verified, and how many. Nothing but the engine decides this."""

from collections.abc import Sequence
from time import perf_counter

import numpy
import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.utils import logging

from ..protocol import Draft, Drafting, Guess, GuessedLogits, GuessedTokens, Prefix, SpeculationConfig
from ..protocol.config import MAX_TREE, TreeSize
from ..trees.best_first import best_paths
from ..trees.sampled import sampled_paths
from .copies import COPIED, Copied, Copies, grafted, grafted_beside_riders
from .grow import Growing
from .pace import Pace
from .riders import SparseShape
from .steps import Steps
from .vocabulary import cut, to_target, widen
from .warp import sequential_choice, warp

logger = logging.get_logger(__name__)
WORTH_COPYING = 0.35  # chance that a copied token behind a sparse tree is reached


def best_first_tree(
    logits: Tensor, num_nodes: int, factors: numpy.ndarray | None = None, vocabulary: Tensor | None = None
) -> Draft:
    """The tree with the largest expected number of accepted tokens, if the guesses mean what they say.

    Args:
        logits: `(K, V')`; row `d` guesses the token at distance `d + 1`.
        num_nodes: N, at least 1; fewer nodes come back only if there are no more.
        factors: `(K,)`, by which each distance's probabilities are corrected; default: taken at their word.
        vocabulary: int64 `(V',)`, the target's id of each of the drafter's.

    Returns:
        A draft of N nodes, most probable first (so parents come before children, and the first n nodes are the best tree of n),
        with `beliefs` and without `q`.

    Raises:
        ValueError: `num_nodes` below 1.
    """
    if num_nodes < 1:
        raise ValueError(f"A tree needs at least one node, but num_nodes is {num_nodes}.")
    top, ids = logits.float().log_softmax(-1).topk(min(num_nodes, logits.shape[1]), dim=-1)
    if factors is not None:
        top = top + torch.from_numpy(factors).to(top)[:, None].log()
    scores = top.tolist()
    if vocabulary is not None:
        scores = [[score for score in row if score > -torch.inf] for row in scores]
    paths, tokens = best_paths(scores, num_nodes), to_target(ids, vocabulary).tolist()
    chosen = [tokens[depth][rank] for depth, rank in zip(paths.depths, paths.ranks, strict=True)]
    return Draft(torch.tensor(chosen, device=logits.device), paths.parents, beliefs=paths.beliefs)


def sampled_tree(q: Tensor, num_nodes: int, generator: torch.Generator | None = None) -> Draft:
    """A tree of the best-first shape, its siblings drawn without replacement from `q`, float32 `(K, V)`, which it carries."""
    paths, tokens = sampled_paths(q, num_nodes, generator)
    return Draft(tokens, paths.parents, q[torch.tensor(paths.depths, device=q.device)])


class Shape:
    """One call's drafts.

    Args:
        config: the drafter's.
        sampled: whether the acceptance rule wants drafts drawn from `q`.
        pace: how much is worth drafting.
        vocab_size: V, of the target.
        author: whose guesses these are, for messages.
    """

    def __init__(self, config: SpeculationConfig, sampled: bool, pace: Pace, vocab_size: int, author: str = "The drafter"):
        self.config, self.sampled, self.pace, self.vocab_size, self.author = config, sampled, pace, vocab_size, author
        self.generator: torch.Generator | None = None  # of draws; None: torch's own
        self.sparse: SparseShape | None = None
        self.copies: Copies | None = None
        self.alone = False  # whether the last round's drafts were copied without asking the drafter
        self.steps = Steps(pace)

    def __call__(
        self,
        drafting: Drafting,
        prefixes: list[Prefix],
        processors: Sequence[LogitsProcessorList],
        branches: bool,
        spaces: Sequence[int] | None = None,
    ) -> list[Draft]:
        """A draft for each row: at most `room` deep, copies apart, without a token where there is no guess.

        Args:
            drafting: guesses.
            prefixes: of the rows.
            processors: of the rows, the target's.
            branches: whether trees can be verified in this round.
            spaces: how deep what is copied may be in a tree; default: as deep as guesses, behind a text of which some may be
                taken back, or for a drafter that has to be asked every time.

        Raises:
            ValueError: a guess that is none; the message says what is wrong with it.
        """
        begun = perf_counter()
        copied = self._copied(prefixes, branches, spaces)
        free = branches and self.config.tree_size == "auto" and self.sparse is None and spaces is not None
        going_on = [beliefs for prefix, (_, beliefs) in zip(prefixes, copied, strict=True) if prefix.room]
        self.alone = free and self.pace.spares(going_on)
        if self.alone:
            nothing = Draft.chain(prefixes[0].ids[0, :0])
            return self.pace.cut([grafted(nothing, *own, MAX_TREE) for own in copied], 0.0)
        guesses = self._ask(drafting.propose(prefixes), prefixes)
        guesses = self.steps.further(guesses, prefixes, begun, self._ask)
        size = self._size(branches, guesses)
        drafts: list[Draft] = [Draft.chain(prefix.ids[0, :0]) for prefix in prefixes]
        growing: dict[int, Growing] = {}
        for row, (guess, prefix, processor) in enumerate(zip(guesses, prefixes, processors, strict=True)):
            if prefix.room == 0:
                continue
            if isinstance(guess, GuessedTokens):
                drafts[row] = self._found(guess, prefix, size)
            elif guess.riders is not None:
                if branches:
                    self.sparse = self.sparse or SparseShape(self.config, self.pace, guess)
                    drafts[row] = self.sparse.draft(guess, prefix, self.vocab_size)
            elif not len(guess.logits) or not self._usable(guess):
                continue
            elif guess.bias is not None or guess.extend is not None:
                growing[row] = self._growing(guess, prefix, processor, size)
            else:
                drafts[row] = self._independent(guess, prefix, processor, size)
        self.steps.grow(growing, len(prefixes), begun)
        for row, own in growing.items():
            drafts[row] = draft = own.draft()
            if own.guess.confidences is not None and size is None:
                before = torch.cat([prefixes[row].ids[0, -1:], draft.tokens[:-1]])
                drafts[row] = draft if self.sampled else draft.first(self._worth(own.guess, before))
        drafts = [self._graft(*own, size) for own in zip(drafts, prefixes, copied, strict=True)]
        return self.pace.cut(drafts) if size == "auto" and self.sparse is None else drafts

    def _copied(self, prefixes: list[Prefix], branches: bool, spaces: Sequence[int] | None) -> list[Copied]:
        """What can be copied behind each row, with its chances; nothing where that is not wanted."""
        if not self.config.graft or self.sampled:
            return [([], [])] * len(prefixes)
        self.copies = self.copies or Copies(len(prefixes))
        deep = branches and self.config.tree_size is not None and spaces is not None
        found = []
        for row, prefix in enumerate(prefixes):
            self.copies.read(row, prefix.ids[0], prefix.kept if spaces is None else prefix.ids.shape[1])
            found.append(self.copies.following(row, min(spaces[row] if deep else prefix.room, COPIED) if prefix.room else 0))
        return found

    def _graft(self, draft: Draft, prefix: Prefix, copied: Copied, size: TreeSize) -> Draft:
        """A row's draft with what can be copied, where that promises more; a tree may become deeper than K by it."""
        tokens, beliefs = copied
        if not tokens:
            return draft
        if draft.rider_parents:
            reach = numpy.cumprod(beliefs) >= WORTH_COPYING
            count = int(reach.sum())
            return grafted_beside_riders(draft, tokens[:count], beliefs[:count], self.sparse.riders) if count else draft
        if isinstance(size, int) or (size == "auto" and self.sparse is None):
            if draft.beliefs is None and len(draft):
                return draft  # tokens that were found, of which nobody says how likely they are
            return grafted(draft, tokens, beliefs, MAX_TREE if size == "auto" else int(size))
        own = numpy.cumprod(self.pace.accepted[1 : 1 + len(draft)]).sum()
        if numpy.cumprod(beliefs).sum() <= own:
            return draft
        chosen = prefix.ids.new_tensor(tokens)
        return Draft(chosen, list(range(-1, len(tokens) - 1)), None, beliefs)

    def _ask(self, guesses: Sequence[Guess], prefixes: list[Prefix]) -> list[Guess]:
        """The guesses, if that is what they are."""
        if not isinstance(guesses, Sequence) or len(guesses) != len(prefixes):
            raise ValueError(f"{self.author} was asked about {len(prefixes)} rows, and has to give a list of as many guesses.")
        for guess in guesses:
            if not isinstance(guess, Guess):
                raise ValueError(
                    f"{self.author} gave a {type(guess).__name__} as a guess; it has to be GuessedLogits or GuessedTokens, of "
                    "which the engine makes the drafts (docs/add-a-drafter.md)."
                )
            if isinstance(guess, GuessedLogits) and guess.riders is not None and guess.vocabulary is not None:
                raise ValueError(f"{self.author} has riders and a vocabulary of its own, which do not go together here.")
            if isinstance(guess, GuessedLogits) and guess.logits.ndim != 2:
                raise ValueError(f"{self.author} gave logits of shape {tuple(guess.logits.shape)}: wanted (k, V') for one row.")
        return list(guesses)

    def _size(self, branches: bool, guesses: Sequence[Guess]) -> TreeSize:
        """None for chains, a number of nodes, or "auto"."""
        if not branches:
            return None
        if self.config.tree_size == "auto" and self.sampled:
            if any(isinstance(guess, GuessedTokens) or guess.riders is None for guess in guesses):
                logger.warning_once("acceptance='rejection' has no trees that choose their size: drafting chains. Give a number.")
            return None
        return self.config.tree_size

    def _usable(self, guess: GuessedLogits) -> bool:
        """Whether its logits are numbers."""
        if bool(cut(guess.logits, guess.vocabulary, self.vocab_size).amax(-1).isfinite().all()):
            return True
        logger.warning_once("The drafter's logits are not numbers: going on without drafts where they are not.")
        return False

    def _worth(self, guess: GuessedLogits, before: Tensor) -> int:
        """How long a chain should be behind these tokens, as the drafter's confidences say."""
        sure = guess.confidences
        return self.pace.worth((sure(before) if callable(sure) else sure or [])[: len(before)])

    def _independent(self, guess: GuessedLogits, prefix: Prefix, processor: LogitsProcessorList, size: TreeSize) -> Draft:
        """Distances that do not depend on each other."""
        logits = cut(guess.logits[: prefix.room], guess.vocabulary, self.vocab_size).to(prefix.ids.device)
        if guess.confidences is not None and size is None:
            before = torch.cat([prefix.ids[0, -1:], to_target(logits[:-1].argmax(-1), guess.vocabulary)])
            logits = logits[: self._worth(guess, before)]
        if self.sampled:
            wide = widen(logits, guess.vocabulary, self.vocab_size)
            if isinstance(size, int):
                return sampled_tree(warp(prefix.ids, wide, processor), size, self.generator)
            tokens, scores = sequential_choice(wide, prefix.ids, processor, True, self.generator)
            return Draft.chain(tokens, scores.softmax(-1))
        if size is None:
            return Draft.chain(to_target(logits.argmax(-1), guess.vocabulary))
        if isinstance(size, int):
            return best_first_tree(logits, size, None, guess.vocabulary)
        return best_first_tree(logits, self.pace.most_nodes, self.pace.factors[1 : 1 + len(logits)], guess.vocabulary)

    def _found(self, guess: GuessedTokens, prefix: Prefix, size: TreeSize) -> Draft:
        """Tokens that were copied from somewhere; where no tree is wanted, the path that is believed most."""
        count = len(guess.tokens)
        parents = list(range(-1, count - 1)) if guess.parents is None else list(guess.parents)
        beliefs = guess.beliefs
        if len(parents) != count or (beliefs is not None and len(beliefs) != count):
            raise ValueError(
                f"{self.author} guessed {count} tokens with {len(parents)} parents: one each, and one belief, if any."
            )
        if guess.tokens.ndim != 1 or guess.tokens.is_floating_point():
            raise ValueError(
                f"{self.author} gave tokens of shape {tuple(guess.tokens.shape)}, {guess.tokens.dtype}: wanted ids (N,)."
            )
        depths: list[int] = []
        for node, parent in enumerate(parents):
            if not -1 <= parent < node:
                raise ValueError(f"{self.author} gave node {node} the parent {parent}: parents come first, -1 is the last token.")
            depths.append(1 if parent < 0 else depths[parent] + 1)
        ids = guess.tokens.tolist()
        if any(not 0 <= token < self.vocab_size for token in ids):
            raise ValueError(f"{self.author} guessed ids outside of the target's vocabulary of {self.vocab_size}.")
        if max(depths, default=0) > prefix.room:
            raise ValueError(f"{self.author} guessed {max(depths)} tokens in a row, but there is room for {prefix.room}.")
        if size is not None and count > self.config.max_nodes:
            raise ValueError(f"{self.author} guessed {count} tokens, but at most {self.config.max_nodes} are allowed.")
        chain = parents == list(range(-1, count - 1))
        if size is None and not chain:
            path, node = [], -1
            while children := [child for child, parent in enumerate(parents) if parent == node]:
                node = children[0] if beliefs is None else max(children, key=beliefs.__getitem__)
                path.append(node)
            tokens = prefix.ids.new_tensor([ids[node] for node in path])
            return Draft(tokens, list(range(-1, len(path) - 1)), None, beliefs and [beliefs[node] for node in path])
        if size == "auto" and beliefs is None:
            beliefs = [float(self.pace.accepted[depth]) for depth in depths]
        if size == "auto":
            beliefs = [belief * float(self.pace.factors[depth]) for belief, depth in zip(beliefs, depths, strict=True)]
        return Draft(guess.tokens.to(prefix.ids.device), parents, None, beliefs)

    def _growing(self, guess: GuessedLogits, prefix: Prefix, processor: LogitsProcessorList, size: TreeSize) -> Growing:
        """A tree of which nothing is known."""
        pace, own = self.pace, (guess, prefix, processor)
        if size == "auto":
            return Growing(*own, pace.most_nodes, self.vocab_size, self.sampled, pace.factors, pace.least, self.generator)
        return Growing(*own, size, self.vocab_size, self.sampled, None, 0.0, self.generator)
