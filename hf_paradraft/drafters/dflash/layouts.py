"""Names of DFlash's and DSpark's tensors, as each publisher writes them, and as they are called here."""

from torch import Tensor

# Masks over the vocabulary's padding, statistics and the like are no weights.
LEFT_OUT = ("t2d", "verifier_norm.weight", "verifier_lm_head.weight")
RENAMED = {
    "encoder.fc.": "fc.",
    "encoder.output_norm_enc.": "hidden_norm.",
    "embed_tokens.": "embedding.",
    "lm_head.": "head.",
    "logit_head.": "markov_head.",
    "norm.": "stack.norm.",
    "layers.": "stack.layers.",
}
HEADS = {
    "markov_head.markov_w1.": "markov.before.",
    "markov_head.markov_w2.": "markov.after.",
    "markov_head.gate_proj.": "markov.gate.",
    "markov_head.joint_proj.": "markov.joint.",
    "confidence_head.proj.": "confidence.",
}


def renamed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights by the names that they have here; unknown names stay, for whoever is strict."""
    found = {}
    for name, tensor in tensors.items():
        name = name.removeprefix("model.")
        if name in LEFT_OUT or name == "d2t":
            continue
        for table in (RENAMED, HEADS):
            prefix = next((prefix for prefix in table if name.startswith(prefix)), None)
            name = name if prefix is None else table[prefix] + name.removeprefix(prefix)
        found[name] = tensor
    return found


def published(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights by the names of the speculators layout."""
    back = {ours: theirs for theirs, ours in HEADS.items()}
    back |= {ours: theirs for theirs, ours in RENAMED.items() if not theirs.startswith(("encoder.", "logit_head."))}
    found = {}
    for name, tensor in tensors.items():
        prefix = next((prefix for prefix in back if name.startswith(prefix)), None)
        found[name if prefix is None else back[prefix] + name.removeprefix(prefix)] = tensor
    return found
