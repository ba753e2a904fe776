"""A small model drafts by decoding ahead of the target, itself sped up by its prompt tokens (PPD, section 5.3)."""

from __future__ import annotations

from dataclasses import replace
from time import perf_counter

import torch
from torch import LongTensor, Tensor
from transformers import LogitsProcessorList, PreTrainedModel

from ...decoding.accept import accept, greedy
from ...decoding.cost import round_cost
from ...decoding.pace import Pace
from ...decoding.shape import Shape
from ...decoding.verify import TreeVerifier
from ...protocol import Drafting, Guess, GuessedLogits, Observation, Prefix
from ..lm import LmReader
from .drafter import PpdDrafter


class AheadDrafting(Drafting):
    """One call's drafts, longer than the prompts reach: the model verifies what they guessed, forward by forward.

    A guess's distributions are the model's own behind each token that it decoded, then the last prompts' guesses.

    Args:
        model: with an active PPD adapter; shared with other calls.
        prompts: ids of the adapter's prompts.
        max_length: tokens of a row at most.
    """

    def __init__(self, model: PreTrainedModel, prompts: list[int], max_length: int):
        self.model, self.num_prompts = model, len(prompts)
        self.reader = LmReader(model, max_length, prompts, prompts[0])
        self.own = PpdDrafter.from_model(model)  # what the model guesses for itself
        self.drafting = self.own.start_drafting(model, max_length)
        self.prefixes: list[Prefix] = []
        self.lasts: list[int] = []  # of each row, the last decoded token, which the cache lacks
        self.decoded: list[list[int]] = []  # of each row, the model's own tokens that the cache holds behind the known ones
        self.answers: list[list[Tensor]] = []  # of each row, logits behind the prefix and all its decoded tokens
        self.verifier: TreeVerifier | None = None
        self.pace: Pace | None = None
        self.shape: Shape | None = None

    def propose(self, prefixes: list[Prefix]) -> list[Guess]:
        """What one forward guesses behind each prefix; `further` makes more of it."""
        self._forget(prefixes)
        known = self.reader.known or [0] * len(prefixes)
        prefixes = [replace(prefix, kept=max(prefix.kept, count)) for prefix, count in zip(prefixes, known, strict=True)]
        wanted = max(prefix.room for prefix in prefixes)
        logits = self.reader.read(prefixes, min(wanted, 1 + self.num_prompts), wanted)
        if logits is None:
            return [GuessedLogits(prefix.ids.new_zeros((0, 1)).float()) for prefix in prefixes]
        room = wanted if self.reader.context is None else min(wanted, self.reader.context // 2)
        self.prefixes = [replace(prefix, room=min(prefix.room, room)) for prefix in prefixes]
        self.decoded = [[] for _ in prefixes]
        self.answers = [[row[:1]] for row in logits]
        self.lasts = logits[:, 0].argmax(-1).tolist()
        self.drafting.guesses = [row[1:].float() for row in logits]
        return self._guesses()

    def _guesses(self) -> list[Guess]:
        """As far as they go by now."""
        guesses: list[Guess] = []
        for answers, behind, prefix in zip(self.answers, self.drafting.guesses, self.prefixes, strict=True):
            own = torch.cat(answers)
            whole = torch.cat([own, behind.to(own)]) if len(behind) else own
            more = self._further if len(own) < prefix.room else None
            guesses.append(GuessedLogits(whole[: prefix.room], further=more, decoded=len(own)))
        return guesses

    def _forget(self, prefixes: list[Prefix]) -> None:
        """Drop from the cache what the target has not accepted; each row's last token is read again, for its logits."""
        if self.reader.cache is None or not self.decoded:
            return
        dropped = []
        for index, (prefix, decoded) in enumerate(zip(prefixes, self.decoded, strict=True)):
            known, ids = self.reader.known[index], prefix.ids[0]
            base = min(known, prefix.kept)
            new = ids[base : base + len(decoded)].tolist() if base == known else []
            pairs = enumerate(zip(decoded, new, strict=False))
            same = next((place for place, (ours, theirs) in pairs if ours != theirs), min(len(new), len(decoded)))
            self.reader.known[index] = min(base + same, len(ids) - 1)
            dropped.append(known + len(decoded) - self.reader.known[index])
        self.reader.cache.forget(dropped)
        self.decoded = []

    def _further(self) -> list[Guess]:
        """One round of the model's own: its guesses verified, new ones made."""
        begun = perf_counter()
        if self.verifier is None or self.verifier.cache is not self.reader.cache:
            kwargs = {"past_key_values": self.reader.cache.cache, "use_cache": True}
            self.verifier = TreeVerifier(
                self.model, kwargs, self.reader.cache, self.reader.attention, num_positions=self.reader.context
            )
            config = self.own.speculation_config
            cost = round_cost(self.model, len(self.prefixes)) if config.tree_size == "auto" else None
            self.pace = Pace(self.num_prompts, False, cost, adaptive=False)
            self.shape = Shape(config, False, self.pace, self.own.config.vocab_size)
        lasts = torch.tensor(self.lasts, device=self.model.device)[:, None]
        own = []
        for answers, prefix, last in zip(self.answers, self.prefixes, lasts, strict=True):
            room = min(self.num_prompts, max(0, prefix.room - sum(map(len, answers))))
            own.append(Prefix(last[None], room, 0))
        nothing = [LogitsProcessorList()] * len(own)
        drafts = self.shape(self.drafting, own, nothing, True)
        proposed = perf_counter()
        logits = self.verifier.verify(lasts, [1] * len(own), drafts)
        choices = logits.argmax(-1).tolist()
        verified = perf_counter()
        paths: list[list[int] | None] = []
        observations: list[Observation | None] = []
        for index, (prefix, draft) in enumerate(zip(own, drafts, strict=True)):
            if prefix.room == 0:
                paths.append(None)
                observations.append(None)
                continue
            buffer: LongTensor = prefix.ids.new_zeros((1, len(draft) + 2))
            emitted = list(accept(draft, logits[index], buffer, 1, nothing[index], greedy, choices[index]))
            path = [one.node for one in emitted[:-1]]
            self.decoded[index] += [self.lasts[index], *(one.token for one in emitted[:-1])]
            self.answers[index].append(torch.cat([one.logits for one in emitted]))
            self.lasts[index] = emitted[-1].token
            paths.append(path)
            end = path[-1] if path else -1
            below = [1 + len(draft) + rider for rider, node in enumerate(draft.rider_nodes) if node == end]
            observations.append(Observation(buffer[0, 1:], rider_logits=logits[index, below].float() if below else None))
        self.verifier.keep(paths)
        self.drafting.observe(observations)
        if self.own.config.accuracy is None:  # calibrated trees do not depend on what came true
            self.pace.observe(drafts, paths, proposed - begun, verified - proposed, perf_counter() - begun)
        return self._guesses()
