"""transformers' own way to run a DFlash drafter, beside this loop: the same file, the same
rounds.
"""

import torch
from layouts import LAYOUTS, write
from tiny import tiny_model
from transformers import AutoModel
from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator

import hf_paradraft

PROMPT = torch.tensor([[1, 2, 3, 4, 5]])
OPTIONS = {"do_sample": False, "max_new_tokens": 60, "eos_token_id": None, "pad_token_id": 0}


def test_chains_are_those_of_transformers(tmp_path, monkeypatch):
    config, tensors = LAYOUTS["transformers"]()
    small = {
        "layer_types": ["full_attention"] * 2,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    folder = write(tmp_path, {**config, **small}, tensors)
    target = tiny_model(num_hidden_layers=8, dtype=torch.float32)
    theirs = AutoModel.from_pretrained(folder).eval()
    asked: list[tuple[int, list[int]]] = []
    get = DFlashTokenCandidateGenerator.get_candidates

    def seen(self, input_ids, *args, **kwargs):
        candidates, logits = get(self, input_ids, *args, **kwargs)
        asked.append((input_ids.shape[1], candidates[0, input_ids.shape[1] :].tolist()))
        return candidates, logits

    monkeypatch.setattr(DFlashTokenCandidateGenerator, "get_candidates", seen)
    text = target.generate(PROMPT, **OPTIONS, assistant_model=theirs, speculation_type="dflash")

    chains = hf_paradraft.SpeculationConfig(4, None, never_slower=False, trace=True)
    drafter = hf_paradraft.AutoDrafter.from_pretrained(folder, speculation_config=chains)
    assert torch.equal(target.generate(PROMPT, **OPTIONS, assistant_model=drafter), text)
    length, rounds = PROMPT.shape[1], []
    for entry in drafter.last_stats.trace:
        rounds.append((length, entry.drafted))
        length += len(entry.emitted)
    roomy = [asked_ for asked_ in asked if asked_[0] + 4 < length]
    # nearer to the end only so many are drafted as can be used
    assert rounds[: len(roomy)] == roomy
    assert any(len(entry.accepted) for entry in drafter.last_stats.trace)
