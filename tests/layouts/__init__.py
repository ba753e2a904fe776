"""Tiny random drafters in every published layout: exact keys and names, as their publishers write
them.
"""

import json

import torch
from safetensors.torch import save_file

from .blocks import (
    deepspec,
    deepspec_gemma4,
    dspine,
    jetspec,
    lfm2_dspark,
    minicpm5_dspark,
    muse,
    qwen35_dspark,
    specforge_dspark,
    speculators,
    with_keys,
    xpress,
    zlab,
    zlab_causal,
    zlab_default,
    zlab_dflash2,
    zlab_sliding,
    zlab_swa,
)
from .eagle import (
    deepspec_eagle,
    deepspec_gemma4_eagle,
    nvidia,
    safeai,
    specforge_peagle,
    speculators_eagle,
)

LAYOUTS = {
    "z-lab": zlab,
    "z-lab, default layers": zlab_default,
    "z-lab, sliding": zlab_sliding,
    "z-lab, use_swa": zlab_swa,
    "z-lab, causal": zlab_causal,
    "SpecForge DSpark": specforge_dspark,
    "LFM2 DSpark": lfm2_dspark,
    "JetSpec": jetspec,
    "DeepSpec DFlash": lambda: deepspec(0, confidence=None),
    "DeepSpec DSpark": deepspec,
    "DeepSpec gated": lambda: deepspec(kind="gated", confidence=False),
    "DeepSpec, Qwen3.5's layers": qwen35_dspark,
    "DeepSpec, MiniCPM5's": minicpm5_dspark,
    "DeepSpec rnn": lambda: deepspec(kind="rnn"),
    "DeepSpec Gemma 4 DSpark": deepspec_gemma4,
    "DeepSpec Gemma 4 DFlash": lambda: deepspec_gemma4(0, shared=False),
    "DeepSpec DSpark, behind the anchor": lambda: with_keys(
        deepspec(), sample_from_anchor=False, dflash_query_causal=True
    ),
    "speculators DFlash": speculators,
    "speculators DFlash, whole": lambda: speculators(trimmed=False),
    "speculators DFlash, sliding": lambda: speculators(sliding=True),
    "speculators DFlash, not causal": lambda: speculators(
        sliding=True, sliding_window_non_causal=True
    ),
    "speculators DSpark": lambda: speculators("dspark"),
    "speculators DSpark, fill-in": lambda: speculators("dspark", sample_from_anchor=False),
    "speculators DSpark, rnn": lambda: speculators("dspark", False, markov_head_type="rnn"),
    "speculators DSpark, rnn, fill-in": lambda: speculators(
        "dspark", markov_head_type="rnn", sample_from_anchor=False
    ),
    "speculators DSpark, gated": lambda: speculators("dspark", markov_head_type="gated"),
    "z-lab DFlash2": zlab_dflash2,
    "speculators DFlash2": lambda: speculators("dflash2", trimmed=False),
    "speculators DFlash2, sliding": lambda: speculators("dflash2", trimmed=False, sliding=True),
    "DSpine": dspine,
    "XPress": xpress,
    "speculators XPress": lambda: speculators("xpress"),
    "speculators XPress, behind the anchor": lambda: speculators(
        "xpress", False, sample_from_anchor=True
    ),
    "transformers": muse,
    "SafeAI": safeai,
    "SafeAI, interleaved": lambda: safeai(rope_interleaved=True),
    "SafeAI, whole": lambda: safeai(False),
    "NVIDIA": lambda: nvidia([1, 3, 4]),
    "NVIDIA, inputs": lambda: nvidia([2, 4, 5]),
    "DeepSpec EAGLE-3": deepspec_eagle,
    "DeepSpec Gemma 4 EAGLE-3": deepspec_gemma4_eagle,
    "speculators EAGLE-3": speculators_eagle,
    "speculators EAGLE-3, Qwen3": lambda: speculators_eagle(
        num_layers=2, norms=True, norm_before_residual=False
    ),
    "speculators EAGLE-3, sliding": lambda: speculators_eagle(sliding=True),
    "speculators EAGLE-3, sliding Qwen3": lambda: speculators_eagle(
        num_layers=2, norms=True, sliding=True
    ),
    "speculators EAGLE-3.1": lambda: speculators_eagle(fc_norm=True, norm_output=True),
    "speculators EAGLE-3, gpt-oss": lambda: speculators_eagle(norm_before_fc=True, trimmed=False),
    "speculators P-EAGLE": lambda: speculators_eagle("peagle", 2),
    "SpecForge P-EAGLE": specforge_peagle,
}


def write(folder, config, tensors, pickled=False):
    """The folder, as its publisher would write it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    if pickled:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
