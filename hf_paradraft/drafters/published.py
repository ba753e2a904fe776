"""What a folder of a published drafter is, by its config and its tensors' names; never by its `model_type`.

Formats as their publishers write them: z-lab and SpecForge (DFlash), DeepSpec (DSpark, DFlash, EAGLE-3), speculators, SafeAI
(EAGLE-3), AWS (P-EAGLE), AMD (PARD, PARD-2).
"""

from collections.abc import Iterable, Mapping
from typing import Any

SPECULATORS = {
    "eagle3": "an EAGLE-3 drafter",
    "peagle": "a P-EAGLE drafter",
    "dflash": "a DFlash drafter",
    "dspark": "a DSpark drafter",
    "dflash2": "a DFlash2 drafter",
    "xpress": "an XPress drafter",
    "mtp": "a drafter of MTP layers",
}
ARCHITECTURES = {
    "DFlashDraftModel": "a DFlash drafter",
    "DFlash2DraftModel": "a DFlash2 drafter",
    "DSparkDraftModel": "a DSpark drafter",
    "DSparkSpeculator": "a DSpark drafter",
    "Eagle3Speculator": "an EAGLE-3 drafter",
    "PEagleSpeculator": "a P-EAGLE drafter",
    "PEagleDraftModel": "a P-EAGLE drafter",
    "LlamaForCausalLMEagle3": "an EAGLE-3 drafter",
}
DEEPSPEC = ("Qwen3DSparkModel", "Gemma4DSparkModel")


def identify(config: Mapping[str, Any], tensors: Iterable[str]) -> str | None:
    """Which kind of feature drafter this is, as "a DFlash drafter"; None if it is none that is known.

    Args:
        config: of `config.json`.
        tensors: names of all tensors of the folder.
    """
    names = list(tensors)
    if (kind := config.get("speculators_model_type")) is not None:
        return SPECULATORS.get(kind, f"a speculators drafter of type {kind}")
    if config.get("pard2") or config.get("spd_type") == "pard2" or "pard2_target_layers" in config:
        return "a PARD-2 drafter"
    if any(name.split(".")[-1] == "mask_hidden" for name in names) or "parallel_drafting_mask" in config:
        return "a P-EAGLE drafter"
    own = config.get("architectures") or [""]
    first = own[0] if isinstance(own, list) and own and isinstance(own[0], str) else ""
    nested = config.get("dflash_config")
    projector = nested.get("projector_type") if isinstance(nested, Mapping) else None
    if projector not in (None, "dflash"):
        return {"dspark": "a DSpark drafter", "domino": "a Domino drafter"}.get(projector, f"a DFlash relative ({projector})")
    if first in ARCHITECTURES:
        return ARCHITECTURES[first]
    if first in DEEPSPEC:
        return "a DSpark drafter" if config.get("markov_rank") else "a DFlash drafter"
    if first.endswith("Eagle3Model"):
        return "an EAGLE-3 drafter"
    if config.get("model_type") == "muse_glimmer_assistant":
        return "transformers' own DFlash assistant"
    if "dflash_config" in config:
        return "a DFlash drafter"
    if "eagle_config" in config or "eagle" in first.lower():
        return "an EAGLE-type drafter"
    return _by_tensors(names)


def _by_tensors(names: list[str]) -> str | None:
    tops = {name.split(".")[0] for name in names}
    if "candidate_selector" in tops or any(".attention_conv." in name for name in names):
        return "a DFlash2 drafter"
    if tops & {"markov_head", "logit_head"}:
        return "a DSpark drafter"
    if "fc" in tops or any(name.startswith("encoder.fc.") for name in names):
        if "hidden_norm" in tops:
            return "a DFlash drafter"
        return "an EAGLE-3 drafter" if "midlayer" in tops or "lm_head" in tops else "an EAGLE-1 or EAGLE-2 drafter"
    return None


def refuse_foreign(config: Mapping[str, Any], tensors: Iterable[str]) -> None:
    """Refuse a drafter that reads the target's features, by what it is; arguments as for `identify`.

    Raises:
        ValueError: it is one.
    """
    if (found := identify(config, tensors)) is not None:
        raise ValueError(
            f"This is {found}, which reads the target's hidden states: not served here yet. Load it in vLLM or SGLang."
        )
