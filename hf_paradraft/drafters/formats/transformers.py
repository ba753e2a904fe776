"""transformers' own DFlash assistants."""

from .fields import BLOCKS
from .layout import Layout, outputs

MODEL_TYPE = "muse_glimmer_assistant"

BLOCK_LAYOUT = Layout(
    "transformers",
    lambda config: config.get("model_type") == MODEL_TYPE,
    {
        **BLOCKS,
        "features": outputs("target_layer_ids", needed=True),
        "fill_in": True,
    },
    described=lambda config: {
        **config,
        "layer_types": config.get("layer_types")
        or ["sliding_attention"] * config.get("num_hidden_layers", 5),
        "use_sliding_window": True,
    },
)
