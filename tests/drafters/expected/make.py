"""What speculators' own networks give for tests/layouts.py's drafters: run where speculators 0.9.0
is installed.

    python tests/drafters/expected/make.py

It needs an environment of its own, for its transformers is older. What it writes,
expected.safetensors, is compared with our networks in tests/drafters/test_published_logits.py.
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.losses import resolve_loss_config
from speculators.models.dflash import DFlashSpeculatorConfig
from speculators.models.dflash.core import DFlashDraftModel
from speculators.models.dflash2.config import DFlash2SpeculatorConfig
from speculators.models.dflash2.core import DFlash2DraftModel
from speculators.models.dspark.config import DSparkSpeculatorConfig
from speculators.models.dspark.core import DSparkDraftModel
from speculators.models.eagle3 import Eagle3SpeculatorConfig
from speculators.models.eagle3.core import Eagle3DraftModel
from speculators.models.peagle.config import PEagleSpeculatorConfig
from speculators.models.peagle.core import PEagleDraftModel
from speculators.models.peagle.data import generate_cod_sample_indices
from speculators.models.xpress.config import XPressSpeculatorConfig
from speculators.models.xpress.core import XPressDraftModel
from speculators.proposals.greedy import GreedyTokenProposalConfig

sys.path.insert(0, str(Path(__file__).parents[2]))
from layouts import LAYOUTS
from layouts.parts import D, V

# of the prefix, the newest token included, and of the text that the networks want to see
LENGTH, WHOLE = (
    12,
    24,
)


def shared():
    """Embedding and head of the target, and a text with its features."""
    generator = torch.Generator().manual_seed(7)
    make = {"embedding": (V, D), "head": (V, D), "features": (WHOLE, 3 * D)}
    tensors = {name: torch.randn(shape, generator=generator) * 0.5 for name, shape in make.items()}
    tensors["ids"] = torch.randint(0, 30, (WHOLE,), generator=generator)
    return tensors


def build(config_class, model_class, config, tensors, common):
    """A model with these weights; what it takes of its target is put in by hand."""
    values = {
        name: value for name, value in config.items() if name not in ("architectures", "vocab_size")
    }
    described = SpeculatorsConfig(
        algorithm=config["speculators_model_type"],
        proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=3)],
        default_proposal_method="greedy",
        verifier=VerifierConfig(name_or_path=None, architectures=[]),
    )
    made = config_class(**values, speculators_config=described)
    made.transformer_layer_config._attn_implementation = "eager"
    model = model_class(made)
    state = {"embed_tokens.weight": common["embedding"], **tensors}
    if not model.use_draft_vocab:
        state.setdefault("lm_head.weight", common["head"])
    rows = common["head"][tensors["t2d"]] if model.use_draft_vocab else common["head"]
    state |= {"verifier_lm_head.weight": rows, "verifier_norm.weight": torch.ones(D)}
    wrong = model.load_state_dict(state, strict=False)
    assert not wrong.unexpected_keys, wrong
    assert not [name for name in wrong.missing_keys if "rotary" not in name], wrong
    return model.eval()


def block(model, common):
    """A block behind the prefix, every token before one known: hidden states, logits, biases,
    confidences.
    """
    text = {name: common[name][None] for name in ("features", "ids")}
    anchor = torch.zeros(1, WHOLE)
    anchor[0, LENGTH - 1] = 1
    hidden, logits, *_ = model._backbone_forward(
        text["features"],
        text["ids"],
        anchor,
        torch.zeros(1, WHOLE, D),
        torch.zeros(1, WHOLE, dtype=torch.long),
        max_anchors=1,
    )
    parts = {"logits": logits[0]}
    size = model.block_size
    before = text["ids"][:, LENGTH - 1 : LENGTH - 1 + size]
    if not model.config.sample_from_anchor:
        anchor_behind = (
            text["ids"][:, LENGTH - 2 : LENGTH - 1]
            if hasattr(model, "refiner_head")
            else before[:, :1]
        )
        before = torch.cat([anchor_behind, before[:, :-1]], dim=1)
    if hasattr(model, "candidate_selector"):
        parts["candidates"], parts["scores"] = (
            part[0] for part in model.candidate_selector.select(logits, hidden, before)
        )
    if hasattr(model, "refiner_head"):
        parts["bias"] = model.refiner_head.block_bias(before, hidden.view(1, size, -1))[0]
    if (head := getattr(model, "markov_head", None)) is not None:
        embedded = head.prev_embeddings(before)
        parts["bias"] = head.block_bias(
            prev_token_ids=before, hidden_states=hidden.view(1, size, -1)
        )[0]
        parts["confidence"] = model.confidence_head(
            torch.cat([hidden.view(1, size, -1), embedded], dim=-1)
        )[0]
    return parts


def pairs(model, common):
    """Two steps of EAGLE-3: behind every pair, and behind the true next token fed with the
    drafter's own state.
    """
    seen = []
    model.lm_head.register_forward_hook(lambda module, args, output: seen.append(output[0]))
    model(
        common["features"][None, :-1],
        common["ids"][None, 1:],
        torch.zeros(1, WHOLE - 1, dtype=torch.long),
        ttt_steps=2,
    )
    return {"logits": seen[0], "second": seen[1]}


def masks(model, common, depths=4):
    """P-EAGLE: the logits behind one pair and the masks after it."""
    seen, size = [], WHOLE - 1
    model.lm_head.register_forward_hook(lambda module, args, output: seen.append(output[0]))
    options = {"num_depths": depths, "down_sample_ratio": 1.0, "down_sample_ratio_min": 1.0}
    for seed in range(1000):
        torch.manual_seed(seed)
        anchors, depth = generate_cod_sample_indices(size, torch.ones(1, size), **options)
        rows = [((anchors == LENGTH - 2) & (depth == wanted)).nonzero() for wanted in range(depths)]
        if all(len(row) for row in rows):
            break
    torch.manual_seed(seed)
    hidden = torch.zeros(1, size, D)
    documents = torch.zeros(1, size, dtype=torch.long)
    options |= {
        "verifier_last_hidden_states": hidden,
        "loss_config": resolve_loss_config("kl_div", "eager"),
    }
    model(common["features"][None, :-1], common["ids"][None, 1:], documents, **options)
    return {"logits": torch.stack([seen[0][int(row)] for row in rows])}


@torch.no_grad()
def main():
    common, tensors = shared(), {}
    classes = {
        "dflash": (DFlashSpeculatorConfig, DFlashDraftModel, block),
        "dflash2": (DFlash2SpeculatorConfig, DFlash2DraftModel, block),
        "xpress": (XPressSpeculatorConfig, XPressDraftModel, block),
        "dspark": (DSparkSpeculatorConfig, DSparkDraftModel, block),
        "eagle3": (Eagle3SpeculatorConfig, Eagle3DraftModel, pairs),
        "peagle": (PEagleSpeculatorConfig, PEagleDraftModel, masks),
    }
    for name, make in LAYOUTS.items():
        config, weights = make()
        if (kind := config.get("speculators_model_type")) is not None:
            config_class, model_class, run = classes[kind]
            for what, tensor in run(
                build(config_class, model_class, config, weights, common), common
            ).items():
                tensors[f"{name}: {what}"] = tensor.contiguous()
    file = Path(__file__).with_name("expected.safetensors")
    save_file({**tensors, **common}, file)
    print(f"{len(tensors)} tensors in {file}")


if __name__ == "__main__":
    main()
