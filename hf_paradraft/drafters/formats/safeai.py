"""SafeAI's and SpecForge's folders of EAGLE-3 and P-EAGLE, which do not say whether layers' numbers
count outputs or inputs.
"""

from .fields import EAGLE3, NO_LAYERS
from .layout import Layout, Said, outputs

LISTED = "eagle_aux_hidden_state_layer_ids"


def _notes(said: Said) -> list[tuple[str, str]]:
    listed = said(LISTED)
    settled = (
        "layers",
        f"{listed}, counted as outputs or inputs: settled by the target's number of layers",
    )
    return [settled if listed else NO_LAYERS]


EAGLE3_LAYOUT = Layout(
    "SafeAI or SpecForge",
    lambda config: True,
    {**EAGLE3, "ambiguous": outputs(LISTED), "notes": _notes},
    part="eagle_config",
)
