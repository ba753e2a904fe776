"""Drafters in 8 bits draft, and their target's text stays its own."""

import pytest
import torch
from layouts import LAYOUTS, write
from published import TARGET
from torch.nn import Linear
from transformers import BitsAndBytesConfig, QuantoConfig, TorchAoConfig

import hf_paradraft


def torchao():
    return TorchAoConfig(pytest.importorskip("torchao.quantization").Int8WeightOnlyConfig())


PACKED = {"quanto": lambda: QuantoConfig(weights="int8"), "torchao": torchao}


@pytest.mark.parametrize("how", PACKED)
@pytest.mark.parametrize(
    "name", ["z-lab", "speculators DSpark", "speculators EAGLE-3", "parallelspec", "mtp"]
)
def test_a_packed_drafter_drafts(name, how, tmp_path):
    if name in LAYOUTS:
        write(tmp_path, *LAYOUTS[name]())
    elif name == "mtp":
        hf_paradraft.MtpDrafter.from_target(TARGET, new=True).save_pretrained(tmp_path)
    else:
        hf_paradraft.ParallelSpecDrafter.from_target(TARGET, "eagle", 3).save_pretrained(tmp_path)
    whole = hf_paradraft.AutoDrafter.from_pretrained(tmp_path, dtype=torch.float32)
    packed = hf_paradraft.AutoDrafter.from_pretrained(
        tmp_path, dtype=torch.float32, quantization_config=PACKED[how]()
    )
    matrices = [part.weight for part in packed.modules() if isinstance(part, Linear)]
    assert matrices
    assert all(type(weight).__name__ in ("WeightQBytesTensor", "Int8Tensor") for weight in matrices)

    ids = torch.tensor([[1, 2, 3, 4, 5, 6]])
    options = {"do_sample": False, "max_new_tokens": 24, "eos_token_id": None, "pad_token_id": 0}
    packed.speculation_config.never_slower = False
    plain = TARGET.generate(ids, **options)
    assert torch.equal(plain, TARGET.generate(ids, **options, assistant_model=packed))
    assert packed.last_stats.num_drafted > 20

    whole.attach(TARGET)
    features = {
        key: torch.randn(1, 5, TARGET.config.hidden_size, dtype=torch.float32)
        for key in whole.needs(TARGET)
    }
    logits, near = (drafter.draft_logits(ids, features, 1) for drafter in (whole, packed))
    assert (near - logits).abs().mean() < 0.1 * logits.std()
    assert not torch.equal(near, logits)
    with pytest.raises(ValueError, match="load it without quantization_config to save it"):
        packed.save_pretrained(tmp_path / "again")


def test_another_way_to_pack_is_refused(tmp_path):
    write(tmp_path, *LAYOUTS["z-lab"]())
    with pytest.raises(ValueError, match="pass a QuantoConfig or a TorchAoConfig"):
        hf_paradraft.AutoDrafter.from_pretrained(
            tmp_path, quantization_config=BitsAndBytesConfig(load_in_8bit=True)
        )
