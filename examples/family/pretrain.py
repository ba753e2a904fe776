"""Train one of the embedded family's autoregressive models from nothing; stop and resume at
will.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from tqdm.auto import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hf_paradraft.hardware import fast_dtype

from .corpus import Corpus


def new_model(
    tokenizer: PreTrainedTokenizerFast,
    num_layers: int,
    hidden_size: int = 256,
    intermediate_size: int = 512,
):
    """A randomly initialised Llama with tied embeddings; the branches' last projections start at
    zero.
    """
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            num_hidden_layers=num_layers,
            num_attention_heads=hidden_size // 64,
            num_key_value_heads=hidden_size // 64,
            max_position_embeddings=1024,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    for layer in model.model.layers:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
        torch.nn.init.zeros_(layer.mlp.down_proj.weight)
    return model


def grow(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, num_layers: int
) -> LlamaForCausalLM:
    """A deeper model that computes the same function: evenly between the trained layers stand new
    ones that add zero at first.
    """
    config = model.config
    deep = new_model(tokenizer, num_layers, config.hidden_size, config.intermediate_size)
    deep.model.embed_tokens.load_state_dict(model.model.embed_tokens.state_dict())
    deep.model.norm.load_state_dict(model.model.norm.state_dict())
    for index, layer in enumerate(model.model.layers):
        deep.model.layers[index * num_layers // config.num_hidden_layers].load_state_dict(
            layer.state_dict()
        )
    return deep


def answer_loss(model: LlamaForCausalLM, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Mean cross-entropy over labelled tokens; the head runs on those rows alone."""
    hidden = model.model(input_ids=batch["input_ids"], use_cache=False).last_hidden_state[:, :-1]
    labels = batch["labels"][:, 1:]
    labelled = labels != -100
    return F.cross_entropy(model.lm_head(hidden[labelled]), labels[labelled])


def learning_rate(step: int, steps: int, warmup: int = 20, decay: float = 0.5) -> float:
    """Linear warm-up, a plateau, then linear decay over the last `decay` share; a factor in (0,
    1].
    """
    falling = max(0.01, (steps - step) / (decay * steps)) if decay else 1.0
    return min((step + 1) / warmup, 1.0, falling)


def pretrain(
    model: LlamaForCausalLM,
    corpus: Corpus,
    output_dir: Path,
    steps: int,
    lr: float = 0.02,
    decay: float = 0.5,
    first_batch: int = 0,
):
    """Train `model` in place and save it, with what a later call needs to resume, under
    `output_dir`.

    Args:
        model: trained in fp32.
        corpus: gives batch `first_batch + step` at `step`.
        output_dir: holds `model.safetensors` and `state.pt`; a folder with a state is resumed.
        steps: in all.
        lr: of Muon; the embedding and the norms learn with AdamW at a tenth of it.
        decay: the share of the steps over which the learning rate falls.
    """
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    optimizers = [
        torch.optim.Muon(matrices, lr=lr, weight_decay=0.01),
        torch.optim.AdamW(others, lr=lr * 0.1, betas=(0.9, 0.95)),
    ]
    state_file, start = output_dir / "state.pt", 0
    if state_file.exists():
        state = torch.load(state_file, weights_only=True)
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        start = state["step"]
    model.train()
    model.set_attn_implementation("eager")  # with compiled layers twice as fast as SDPA on a CPU
    for layer in model.model.layers:
        layer.compile(dynamic=True)
    bar = tqdm(
        range(start, steps), initial=start, total=steps, desc=output_dir.name, mininterval=10
    )
    average = None
    for step, batch in zip(bar, corpus.batches(first_batch + start), strict=False):
        factor = learning_rate(step, steps, decay=decay)
        for optimizer, rate in zip(optimizers, (lr, lr * 0.1), strict=True):
            optimizer.param_groups[0]["lr"] = rate * factor
        with torch.autocast("cpu", torch.bfloat16, enabled=fast_dtype() == torch.bfloat16):
            loss = answer_loss(model, batch)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        average = loss.item() if average is None else 0.95 * average + 0.05 * loss.item()
        bar.set_postfix(loss=f"{average:.3f}")
        if (step + 1) % 100 == 0 or step + 1 == steps:
            output_dir.mkdir(parents=True, exist_ok=True)
            state = {
                "model": model.state_dict(),
                "optimizers": [o.state_dict() for o in optimizers],
                "step": step + 1,
            }
            torch.save(state, state_file.with_suffix(".tmp"))
            state_file.with_suffix(".tmp").replace(state_file)
    model.eval()
    model.save_pretrained(output_dir)
