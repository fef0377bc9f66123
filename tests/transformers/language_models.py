"""Tiny language models of many families, and a loop that steps them at random."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from aiopar import Done
from aiopar.transformers import CausalLM, Completion, Prompt, Token

VOCABULARY = 97
END = 2

# Large initial weights: the most likely token is well apart from the next one.
_BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": END,
    "pad_token_id": 0,
}
_LLAMA = _BASE | {"intermediate_size": 32, "num_key_value_heads": 2}
_WINDOW = _LLAMA | {"sliding_window": 8}
_HYBRID = _WINDOW | {"head_dim": 8, "layer_types": ["sliding_attention", "full_attention"]}
_SHARED = _WINDOW | {
    "head_dim": 8,
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 8,
}
_MLA = _LLAMA | {
    "num_key_value_heads": 4,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
    "original_max_position_embeddings": 64,
    "factor": 2.0,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": _LLAMA,
    "Qwen2": _WINDOW | {"use_sliding_window": True, "max_window_layers": 1},
    "Qwen3": _LLAMA | {"head_dim": 8},
    "Mistral": _WINDOW,
    "Ministral3": _LLAMA | {"head_dim": 8},
    "Gemma": _LLAMA | {"head_dim": 8},
    "Gemma2": _HYBRID,
    "Gemma3": _HYBRID,
    "Gemma3n": _SHARED
    | {"intermediate_size": [32] * 4, "activation_sparsity_pattern": [0.0] * 4, "laurel_rank": 4},
    "Gemma4": _SHARED | {"global_head_dim": 16},
    "Phi": _LLAMA,
    "Phi3": _LLAMA | {"rope_parameters": _LONGROPE, "original_max_position_embeddings": 64},
    "GPT2": _BASE,
    "GPTBigCode": _BASE,
    "GPTNeoX": _BASE | {"intermediate_size": 32},
    "OPT": _BASE | {"ffn_dim": 32, "word_embed_proj_dim": 32},
    "Falcon": _BASE | {"alibi": False, "multi_query": True},
    "StableLm": _LLAMA,
    "Cohere": _LLAMA,
    "Cohere2": _HYBRID,
    "Olmo2": _LLAMA,
    "Olmoe": _LLAMA | {"num_experts": 4, "num_experts_per_tok": 2},
    "Mixtral": _WINDOW | {"num_local_experts": 4},
    "GptOss": _HYBRID | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "DeepseekV3": _MLA,
    "Llama4": _LLAMA
    | {
        "num_hidden_layers": 4,
        "head_dim": 8,
        "attention_chunk_size": 8,
        "intermediate_size_mlp": 32,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
    },
}


def tiny(family: str = "Llama", **options: Any) -> Any:
    """A tiny model with random weights."""
    text = "Text" if family in ("Gemma3", "Gemma3n", "Gemma4", "Llama4") else ""
    config = getattr(transformers, f"{family}{text}Config")(**FAMILIES[family] | options)
    name = family + ("LMHeadModel" if family == "GPT2" else "ForCausalLM")
    torch.manual_seed(0)
    model = getattr(transformers, name)._from_config(config).eval()
    model.generation_config.eos_token_id = END
    return model


def prompts(count: int, seed: int, **options: Any) -> list[Prompt]:
    """Prompts of random lengths."""
    draw = random.Random(seed)
    return [
        Prompt(
            [draw.randrange(3, VOCABULARY) for _ in range(draw.randint(1, 40))],
            max_tokens=draw.randint(1, 20),
            **options,
        )
        for _ in range(count)
    ]


def generate(model: Any, prompt: Prompt) -> list[int]:
    """What transformers generates for the prompt alone."""
    ids = torch.tensor([prompt.prompt])
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=prompt.max_tokens,
        do_sample=False,
        pad_token_id=0,
    )
    tokens: list[int] = output[0, ids.shape[1] :].tolist()
    return tokens


def ids(tokens: Sequence[Token]) -> list[int]:
    """The ids of tokens."""
    return [token.id for token in tokens]


def serve(
    model: CausalLM,
    wanted: Sequence[Prompt],
    seed: int = 0,
    check: Callable[[dict[int, Any]], None] = lambda running: None,
) -> list[Completion]:
    """Step the prompts; they join, pause, are preempted, and are resumed at random."""
    draw = random.Random(seed)
    waiting = list(enumerate(wanted))
    running: dict[int, Any] = {}
    parts: dict[int, list[Token]] = {i: [] for i, _ in waiting}
    preempted: dict[int, Any] = {}
    done: dict[int, Completion] = {}
    while len(done) < len(wanted):
        while waiting and len(running) < 4 and draw.random() < 0.5:
            i, prompt = waiting.pop(0)
            running[i] = model.start(prompt)
        for i in [i for i in preempted if draw.random() < 0.3]:
            running[i] = preempted.pop(i)
        for i in [i for i in running if draw.random() < 0.05]:
            preempted[i] = running.pop(i)
            model.stop(preempted[i])
            if draw.random() < 0.5:  # as if its worker had been lost
                preempted[i] = model.resume(wanted[i], parts[i])
        stepped = [i for i in running if draw.random() < 0.85]
        if not stepped:
            continue
        for i, part in zip(stepped, model.step([running[i] for i in stepped]), strict=True):
            assert not isinstance(part, Exception)
            if isinstance(part, Done):
                model.stop(running.pop(i))
                done[i] = part.result
                part = part.part  # noqa: PLW2901  # the last part
            if part is not None:
                parts[i].append(part)
        check(running)
    assert all(done[i].tokens == tuple(parts[i]) for i in done)
    return [done[i] for i in range(len(wanted))]


def byte_tokenizer() -> Any:
    """A tokenizer of single bytes: a character may be several tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<s>": 0, "</s>": 1} | {byte: 2 + i for i, byte in enumerate(alphabet)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    fast: Any = transformers.PreTrainedTokenizerFast
    return fast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


def speaker(script: Sequence[int], vocabulary: int) -> Any:
    """A GPT-2 that says `script`, whatever it reads: only the position counts."""
    length = len(script)
    config = transformers.GPT2Config(
        vocab_size=vocabulary,
        n_positions=length,
        n_embd=length + length % 2,
        n_layer=1,
        n_head=2,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
    )
    model: Any = transformers.GPT2LMHeadModel(config)
    model.eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
        model.transformer.ln_f.weight.fill_(1)
        model.transformer.wpe.weight.fill_diagonal_(1)
        for position, token in enumerate(script[1:]):
            model.lm_head.weight[token, position] = 1
    return model
