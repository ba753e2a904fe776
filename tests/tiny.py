"""Tiny models and tokenizers, made here; nothing is downloaded."""

import copy

import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    Gemma4TextConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

import hf_paradraft

VOCAB, EOS, MASK = 32, 30, 31
# the argument of generate and of forwards, before and since transformers 5.24
CACHE = hf_paradraft.names.OUTPUT_CACHE

SHARED = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.4,
    "eos_token_id": EOS,
    "bos_token_id": None,
    "pad_token_id": None,
}
ARCHITECTURES = {
    "llama": lambda **kw: LlamaConfig(**{**SHARED, **kw}),
    "qwen2": lambda **kw: Qwen2Config(**{**SHARED, **kw}),
    "qwen3": lambda **kw: Qwen3Config(**{**SHARED, "head_dim": 8, **kw}),
    "mistral-sliding": lambda **kw: MistralConfig(**{**SHARED, "sliding_window": 12, **kw}),
    "gemma4": lambda **kw: (
        # windows, heads that differ, and last layers that read another one's cache
        Gemma4TextConfig(
            **{
                **SHARED,
                "num_hidden_layers": 4,
                "head_dim": 8,
                "global_head_dim": 16,
                "num_global_key_value_heads": 1,
                "sliding_window": 12,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
                "num_kv_shared_layers": 2,
                "hidden_size_per_layer_input": 8,
                "vocab_size_per_layer_input": kw.get("vocab_size", VOCAB),
                **kw,
            }
        )
    ),
    "gpt2": lambda **kw: GPT2Config(
        vocab_size=kw.get("vocab_size", VOCAB),
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=kw.get("max_position_embeddings", 256),
        initializer_range=0.4,
        eos_token_id=EOS,
        bos_token_id=None,
    ),
}


def tiny_model(
    architecture: str = "llama", seed: int = 0, dtype: torch.dtype = torch.float64, **overrides
):
    """A random causal LM of about 20 thousand parameters, in evaluation mode.

    In float64: in fp32 two logits of random weights may lie so near each other that the machine
    decides which is larger.
    """
    torch.manual_seed(seed)
    config = ARCHITECTURES[architecture](**overrides)
    return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config).to(dtype).eval()


def near_copy(model, noise: float = 0.02, seed: int = 1):
    """A drafter that agrees with `model` often but not always: its weights with noise."""
    torch.manual_seed(seed)
    copy = type(model)(model.config).to(model.dtype).eval()
    copy.load_state_dict(model.state_dict())
    with torch.no_grad():
        for parameter in copy.parameters():
            parameter.add_(noise * torch.randn_like(parameter))
    drafter = hf_paradraft.PardDrafter.from_causal_lm(copy, mask_token_id=MASK)
    drafter.speculation_config.never_slower = (
        False  # it is as large as its target: drafting never pays
    )
    return drafter


def with_prompts(model, m: int = 2, e: int = 1, calibrated: bool = False, seed: int = 0):
    """`model` with untrained prompt tokens; `calibrated` makes up how often they guess right."""
    torch.manual_seed(seed)
    config = hf_paradraft.PpdConfig(num_prompt_tokens=m, num_ensembles=e)
    if calibrated:
        config.accuracy = [
            [0.4 * 0.8**distance * 0.6**rank for rank in range(16)] for distance in range(m)
        ]
    return get_peft_model(model, config)


def with_noise_adapter(target, seed: int = 3, std: float = 0.3):
    """A copy of `target` with a random LoRA adapter that changes what it says, and the UNO drafter
    of that adapter.
    """
    config = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = get_peft_model(copy.deepcopy(target), config)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=std)
    return model, hf_paradraft.UnoDrafter(config, get_peft_model_state_dict(model))


def make_tokenizer(words: str = "a b c d e f g h", size: int = VOCAB) -> PreTrainedTokenizerFast:
    """Words by blanks; ids 30 and 31 are the end of text and the mask."""
    vocab = {word: index for index, word in enumerate(words.split())}
    vocab |= {f"w{index}": index for index in range(len(vocab), size - 2)} | {
        "<eos>": size - 2,
        "<mask>": size - 1,
    }
    backend = Tokenizer(models.WordLevel(vocab, unk_token="a"))
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit()])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<eos>",
        mask_token="<mask>",
        pad_token="<eos>",
        chat_template=(
            "{% for m in messages %}{{ ' ' + m['role'][0] + ' ' + m['content'] }}"
            "{% if m['role'] == 'assistant' %}{{ ' <eos>' }}{% endif %}{% endfor %}"
            "{% if add_generation_prompt %}{{ ' a ' }}{% endif %}"
        ),
    )


def write_gguf(file, model):
    """A Llama with heads of its own, packed as llama.cpp has it; its tokens are letters."""
    from gguf import GGUFWriter  # an extra

    config, writer = model.config, GGUFWriter(file, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*"ABCDEFGHIJKLMNOPQRSTUVWXYZabc", "AB", "<eos>", "<mask>"])
    writer.add_token_types([1] * (VOCAB - 2) + [3, 3])
    writer.add_token_merges(["A B"])
    writer.add_eos_token_id(EOS)
    parts = dict(
        pair.split("=")
        for pair in (
            "model.embed_tokens=token_embd model.norm=output_norm lm_head=output "
            "self_attn.q_proj=attn_q self_attn.k_proj=attn_k self_attn.v_proj=attn_v "
            "self_attn.o_proj=attn_output mlp.gate_proj=ffn_gate mlp.up_proj=ffn_up "
            "mlp.down_proj=ffn_down post_attention_layernorm=ffn_norm input_layernorm=attn_norm "
            "model.layers=blk"
        ).split()
    )
    for name, tensor in model.state_dict().items():
        for ours, theirs in parts.items():
            name = name.replace(ours, theirs)
        for part, heads in (
            ("attn_q", config.num_attention_heads),
            ("attn_k", config.num_key_value_heads),
        ):
            if part in name:  # llama.cpp has the halves of a head's rotation side by side
                tensor = (
                    tensor.view(heads, 2, -1, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
                )
        writer.add_tensor(name, tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def pard_folder(tmp_path):
    folder = tmp_path / "drafter"
    near_copy(tiny_model()).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def ppd_folder(tmp_path):
    folder = tmp_path / "adapter"
    model = get_peft_model(
        tiny_model(), hf_paradraft.PpdConfig(num_prompt_tokens=2, accuracy=[[0.5, 0.2], [0.3, 0.1]])
    )
    model.save_pretrained(folder)
    return folder


def letters():
    """A tokenizer whose tokens are letters, with nothing between them."""
    ids = {letter: index for index, letter in enumerate("abcdefghijklmnopqrstuvwxyzABCDEF")}
    backend = Tokenizer(models.BPE(ids, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def generate(target, drafter, ids, **options):
    """Thirty tokens, greedy, with the drafter."""
    return target.generate(
        ids, assistant_model=drafter, **{"do_sample": False, "max_new_tokens": 30, **options}
    )


class Oracle(hf_paradraft.Drafter, hf_paradraft.Drafting):
    """Knows the answers, all but every fifth token; beside each first guess stands a wrong one."""

    def __init__(self, answers, padding=None):
        self.speculation_config = hf_paradraft.SpeculationConfig(6, tree_size=7, never_slower=False)
        self.answers = answers
        self.padding = padding or [0] * len(answers)

    def start_drafting(self, target, max_length):
        return self

    def propose(self, prefixes):
        return [self.guess(row, prefix) for row, prefix in enumerate(prefixes)]

    def guess(self, row, prefix):
        length = prefix.ids.shape[1] + self.padding[row]
        tokens = self.answers[row, length : length + prefix.room].clone()
        tokens[(length + torch.arange(len(tokens))) % 5 == 0] ^= 1
        if not len(tokens):
            return hf_paradraft.GuessedTokens(tokens)
        parents, acceptance = [-1, -1, *range(1, len(tokens))], [0.1] + [0.9] * len(tokens)
        return hf_paradraft.GuessedTokens(torch.cat([tokens[:1] ^ 1, tokens]), parents, acceptance)


def same_with_an_oracle(target, **inputs):
    options = {
        "do_sample": False,
        "max_new_tokens": 24,
        "eos_token_id": None,
        "pad_token_id": 0,
        **inputs,
    }
    plain = target.generate(**options)
    oracle = Oracle(plain)
    assert torch.equal(
        plain,
        target.generate(
            **options, custom_generate=hf_paradraft.speculative_decoding, drafter=oracle
        ),
    )
    assert oracle.last_stats.mean_emitted > 2
