"""Key-value caches: one for the whole batch, which the next call splits again."""

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import aiopar

from ..sample_trees import Cache
from .comparisons import same
from .waiting import gather, scatter

Devices = tuple[torch.device, ...]


class Decoder(nn.Module):
    """Scores the tokens in its window, by the number of tokens that it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 1)

    def forward(self, ids: Tensor, cache: Any = None) -> dict[str, Any]:
        cache = Cache() if cache is None else cache
        scores = torch.zeros(len(ids), device=ids.device)
        for layer in cache.layers:
            assert layer.seen == layer.count
            before = layer.states[0] if layer.counted[0] else 0
            window = layer.update(self.embed(ids).squeeze(-1))
            scores = scores + window.sum(1) * layer.seen + before
        return {"scores": scores, "cache": cache}


class _Steps:
    """The same steps with a module and with a `DataParallel` of it."""

    def __init__(self, module: nn.Module, devices: Any, cache_name: str, scores: str) -> None:
        self.module = module.eval()
        self.dp = aiopar.DataParallel(module, devices)
        self.cache_name = cache_name
        self.scores = scores

    def check(self, *steps: dict[str, Any], carried: dict[str, str] | None = None) -> None:
        """Run the steps; `carried` names outputs -> arguments of the next step."""
        ours: dict[str, Any] = {}
        plain: dict[str, Any] = {}
        carried = {self.cache_name: self.cache_name, **(carried or {})}
        for inputs in steps:
            with torch.no_grad():
                call = self.dp(**inputs, **ours)
            output = aiopar.wait(call)
            with torch.no_grad():
                expected = self.module(**inputs, **plain)
            assert same(output[self.scores], expected[self.scores])
            assert type(output[self.cache_name]) is type(expected[self.cache_name])
            ours = {name: output[key] for key, name in carried.items()}
            plain = {name: expected[key] for key, name in carried.items()}


@pytest.mark.parametrize("batch", [1, 4, 5])
def test_the_next_call_splits_the_cache(devices: Devices, batch: int) -> None:
    steps = _Steps(Decoder().to(devices[0]), devices, "cache", "scores")
    ids = torch.randint(10, (6, batch, 2), device=devices[0])
    steps.check(*({"ids": each} for each in ids))


def test_each_replica_has_its_own_copy_of_an_empty_cache() -> None:
    cache = Cache()
    pieces = scatter((torch.zeros(2, 1), cache), ["cpu"] * 2)
    for _, piece in pieces:
        piece.layers[0].update(torch.ones(1, 2))
    assert [piece.layers[0].seen for _, piece in pieces] == [2, 2]
    assert (cache.layers[0].seen, cache.layers[0].count.item()) == (0, 0)
    assert cache.layers[0].counted == {0: False}


def test_devices_of_a_cache() -> None:
    cache = Cache()
    cache.layers[0].update(torch.ones(4, 2))
    pieces = scatter(cache, ["cpu", "meta"])
    assert [piece.layers[0].device.type for piece in pieces] == ["cpu", "meta"]
    assert [piece.layers[0].keys.device.type for piece in pieces] == ["cpu", "meta"]
    joined = gather(scatter(cache, ["cpu"] * 2), "meta")
    assert (joined.layers[0].device.type, joined.layers[0].keys.shape) == ("meta", (4, 2))
    assert joined.layers[0].count.device.type == "meta"


def test_caches_in_a_list_are_parts_of_the_whole_batch() -> None:
    caches = [Cache(), Cache()]
    for cache in caches:
        cache.layers[0].update(torch.ones(4, 2))
    joined = gather(scatter(caches, ["cpu"] * 2), "cpu")
    assert [cache.layers[0].keys.shape for cache in joined] == [(4, 2)] * 2


SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


def _model(name: str, head: str, **sizes: Any) -> Any:
    """A small model of transformers, with random weights."""
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed; its protocol is tested by sample_trees")
    import transformers

    kind: Any = transformers
    config = getattr(kind, f"{name}Config")(
        **{"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, **sizes}
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return getattr(kind, f"{name}{head}")(config)


@pytest.mark.parametrize(
    ("make", "cache_name"),
    [
        (lambda: _model("GPT2", "LMHeadModel", n_embd=16, n_layer=2, n_head=2), "past_key_values"),
        (
            lambda: _model("Mistral", "ForCausalLM", sliding_window=4, **SIZES),
            "past_key_values",
        ),
        (
            lambda: _model("Mamba", "ForCausalLM", hidden_size=16, num_hidden_layers=2),
            "cache_params",
        ),
        (
            lambda: _model("Lfm2", "ForCausalLM", layer_types=["conv", "full_attention"], **SIZES),
            "past_key_values",
        ),
    ],
    ids=["gpt2", "mistral", "mamba", "lfm2"],
)
def test_decoders_of_transformers(make: Callable[[], Any], cache_name: str) -> None:
    steps = _Steps(make(), ["cpu"] * 2, cache_name, "logits")
    prompt, *tokens = torch.split(torch.randint(3, 64, (4, 9)), [3] + [1] * 6, dim=1)
    steps.check(*({"input_ids": ids, "use_cache": True} for ids in (prompt, *tokens)))


def test_a_cache_that_the_caller_makes() -> None:
    model = _model("GPT2", "LMHeadModel", n_embd=16, n_layer=2, n_head=2)
    import transformers

    made = transformers.StaticCache(config=model.config, max_cache_len=8)
    dp = aiopar.DataParallel(model.eval(), ["cpu"] * 2)
    ids = torch.randint(3, 64, (4, 6))
    output: Any = None
    for token in torch.split(ids, 2, dim=1):
        with torch.no_grad():
            call = dp(token, past_key_values=made if output is None else output.past_key_values)
        output = aiopar.wait(call)
    with torch.no_grad():
        assert same(output.logits, model(ids).logits[:, -2:])
    assert output.past_key_values.get_seq_length() == 6


def test_an_encoder_decoder_of_transformers() -> None:
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2}
    model = _model("T5", "ForConditionalGeneration", decoder_start_token_id=3, **sizes)
    steps = _Steps(model, ["cpu"] * 2, "past_key_values", "logits")
    always = {"encoder_outputs": model.get_encoder()(torch.randint(3, 64, (4, 6)))}
    tokens = torch.randint(3, 64, (5, 4, 1))
    steps.check(*(always | {"decoder_input_ids": ids, "use_cache": True} for ids in tokens))
