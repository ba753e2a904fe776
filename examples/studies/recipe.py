"""Recipes of drafters' trainings: losses, weights of far guesses, starts, optimisers."""

from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["parallelspec", "mtp", "dspark", "eagle3"]


@dataclass(frozen=True)
class Recipe:
    """How to train.

    Attributes:
        guesses: behind each place of a text.
        fading: weight of each guess, of that before it; None: by how sure those before are
            (D-PACE).
        places: of a text from which is guessed, at most; ParallelSpec guesses from all.
        near: weight of the distance to the target's states, of drafters that are fed with them.
        loss: `tv` (0.1 cross-entropy, 0.9 total variation), `half` of both, `ce`, `kl`, `lk` (`-log
            Σ min(p, q)`), `hybrid` (KL while cold, then total variation).
        end: share of the training, at its end, that has the expected number of accepted guesses as
            its loss.
        own: share of the training, at its end, that adds Draft-OPD's loss on its own guesses, up to
            the first wrong one: what is behind is never asked for, and up to there the text's
            distributions are those of the verification.
        prefix: whether nothing is learned behind the first guess that is wrong.
        start: of the layer: `random`, or `last`, the target's last one.
        muon: as optimiser of matrices, with its rate; AdamW has the others.
        rate: peak learning rate.
        vocabulary: tokens that are guessed, the answers' most frequent; None, or as many as there
            are: all.
        rank: of a head `U (V h)` of its own, learned from the target's best one of that rank on
            (SlimSpec); None: the target's.
        dropping: r of ParallelSpec's conditional output dropping.
        prompts: whether the user's turns are learned too.
        norms: whether EAGLE-3 has a norm for each state that it reads and feeds back a normed one
            (EAGLE-3.1).
        last: whether the last layer is the high one that EAGLE-3 reads.
    """

    guesses: int
    fading: float | None
    places: int = 32
    near: float = 0.0
    loss: str = "tv"
    end: float = 0.0
    own: float = 0.0
    prefix: bool = False
    start: str = "random"
    muon: bool = False
    muon_rate: float = 2e-3
    rate: float = 1e-3
    vocabulary: int | None = 8000
    rank: int | None = None
    dropping: float = 0.6
    prompts: bool = False
    norms: bool = False
    last: bool = False


KINDS: dict[str, Recipe] = {
    "parallelspec": Recipe(3, 0.7, near=1.0),
    "mtp": Recipe(3, 0.6),
    "dspark": Recipe(7, 0.78),
    "eagle3": Recipe(3, 0.6, muon=True, rate=2e-3),
}
CHANGES: dict[str, dict[str, Any]] = {
    "tv": {},
    "ce": {"loss": "ce"},
    "kl": {"loss": "kl"},
    "lk": {"loss": "lk"},
    "hybrid": {"loss": "hybrid"},
    "D-PACE": {"fading": None},
    "expected length at the end": {"end": 0.2},
    "own guesses at the end": {"own": 0.1},
    "valid prefix": {"prefix": True},
    "Muon": {"muon": True},
    "Muon, lk": {"muon": True, "loss": "lk"},
    "Muon 4e-3": {"muon": True, "muon_rate": 4e-3},
    "Muon, 2e-3 for all": {"muon": True, "rate": 2e-3},
    "Muon, 16 places": {"muon": True, "places": 16},
    "Muon, 4,000 tokens": {"muon": True, "vocabulary": 4000},
    "Muon, all tokens": {"muon": True, "vocabulary": None},
    "Muon, all tokens by rank 96": {"muon": True, "vocabulary": None, "rank": 96},
    "Muon, rank 128": {"muon": True, "rank": 128},
    "Muon, ce": {"muon": True, "loss": "ce"},
    "Muon, hybrid": {"muon": True, "loss": "hybrid"},
    "Muon, half": {"muon": True, "loss": "half"},
    "Muon, D-PACE": {"muon": True, "fading": None},
    "Muon, valid prefix": {"muon": True, "prefix": True},
    "Muon, expected length at the end": {"muon": True, "end": 0.2},
    "Muon, own guesses at the end": {"muon": True, "own": 0.1},
    "Muon, from the last layer": {"muon": True, "start": "last"},
    "rate 5e-4": {"rate": 5e-4},
    "rate 2e-3": {"rate": 2e-3},
    "from the last layer": {"start": "last"},
    "16 places": {"places": 16},
    "96 places": {"places": 96},
    "near states": {"near": 1.0},
    "not near states": {"near": 0.0},
    "4,000 tokens": {"vocabulary": 4000},
    "all tokens": {"vocabulary": None},
    "one guess": {"guesses": 1},
    "two guesses": {"guesses": 2},
    "user's turns too": {"prompts": True},
    "norms": {"norms": True},
    "norms, last layer": {"norms": True, "last": True},
}
