"""`CausalLM`: batches of language models, against what transformers generates for each prompt."""

import asyncio
import gc
import math
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import anyio
import pytest
import torch
import transformers
from transformers import BatchEncoding, TopKLogitsWarper, TopPLogitsWarper

import aiopar
from aiopar import ContinuousBatcher, Done, InvalidInput
from aiopar.transformers import CausalLM, Completion, Prompt, Token
from examples.chat_service.weights import smollm2

from .language_models import (
    END,
    FAMILIES,
    VOCABULARY,
    byte_tokenizer,
    generate,
    ids,
    prompts,
    serve,
    speaker,
    tiny,
)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny operators do not wait for threads that a busy machine does not run."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_generate(family: str) -> None:
    model = tiny(family)
    wanted = prompts(8, seed=0)
    completions = serve(CausalLM(model, prefill_tokens=16), wanted)
    assert [ids(done.tokens) for done in completions] == [generate(model, each) for each in wanted]
    assert [done.finish_reason for done in completions] == [
        "stop" if done.tokens[-1].id == END else "length" for done in completions
    ]


@pytest.mark.parametrize(("seed", "prefill_tokens", "count"), [(1, 1, 8), (2, 24, 30)])
def test_joins_leaves_and_preemptions_in_other_orders(
    seed: int, prefill_tokens: int, count: int
) -> None:
    model = tiny()
    wanted = prompts(count, seed)
    held: list[float] = []
    stepper = CausalLM(model, prefill_tokens=prefill_tokens)
    completions = serve(
        stepper, wanted, seed, lambda running: held.extend(map(stepper.held, running.values()))
    )
    assert [ids(done.tokens) for done in completions] == [generate(model, each) for each in wanted]
    assert 1 < max(held) <= 60


def test_attention_may_be_eager() -> None:
    model = tiny(attn_implementation="eager")
    wanted = prompts(8, seed=1)
    completions = serve(CausalLM(model), wanted)
    assert [ids(done.tokens) for done in completions] == [generate(model, each) for each in wanted]


def test_a_long_prompt_holds_up_nobody() -> None:
    model = tiny()
    shapes = []
    model.model.embed_tokens.register_forward_pre_hook(
        lambda _, inputs: shapes.append(tuple(inputs[0].shape))
    )
    stepper = CausalLM(model, prefill_tokens=16)
    options: dict[str, Any] = {"max_tokens": 20, "ignore_eos": True}
    running = stepper.start(Prompt([3], **options))
    [first] = stepper.step([running])
    assert isinstance(first, Token)
    long = [stepper.start(Prompt([7] * n, **options)) for n in (64, 30, 5, 5)]
    parts = [stepper.step([running, *long]) for _ in range(8)]
    assert all(isinstance(part[0], Token) for part in parts)
    firsts = [[part[i] is not None for part in parts].index(True) for i in range(1, 5)]
    assert firsts == [3, 5, 6, 6]  # 16 tokens a step, the oldest first, together if they fit
    assert all(rows * width <= 16 for rows, width in shapes if width > 1)


def test_memory_follows_what_runs() -> None:
    model = tiny()
    stepper = CausalLM(model)
    options: dict[str, Any] = {"max_tokens": 20, "ignore_eos": True}
    before = _bytes()
    short = stepper.start(Prompt([3], **options))
    stepper.step([short])
    few = _bytes() - before
    long = [stepper.start(Prompt([3] * 100, **options)) for _ in range(5)]
    while None in stepper.step([short, *long]):
        pass
    assert _bytes() - before > 100 * few
    for state in long:
        stepper.stop(state)
    parts = [stepper.step([short])[0] for _ in range(5)]
    assert _bytes() - before < 20 * few
    assert ids(short.tokens) == generate(model, Prompt([3], max_tokens=20))[: len(short.tokens)]
    assert all(isinstance(part, Token) for part in parts)
    stepper.stop(short)
    assert _bytes() - before < few


def _bytes() -> int:
    """How much memory all tensors have."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if type(each) is torch.Tensor]
    return sum(each.untyped_storage().nbytes() for each in tensors)


def test_padding_may_reach_beyond_the_context() -> None:
    model = tiny("GPT2")  # its positions are a table of 128
    wanted = [Prompt([3] * 126, max_tokens=2), Prompt([4] * 20, max_tokens=2)]
    stepper = CausalLM(model, prefill_tokens=60)
    [long, short] = map(stepper.start, wanted)
    assert stepper.step([long]) == stepper.step([long]) == [None]
    firsts: Any = stepper.step([long, short])  # six tokens, beside twenty
    assert ids(firsts) == [generate(model, each)[0] for each in wanted]


def test_a_failed_step_can_be_repeated_with_halves() -> None:
    model = tiny()
    wanted = prompts(6, seed=2)
    stepper = CausalLM(model)
    failing = False

    def fail(_: object, inputs: tuple[torch.Tensor]) -> None:
        if failing and inputs[0].shape[1] > 1:
            raise torch.OutOfMemoryError("planted")

    # In the second layer, for prompts: what decodes, and the first layer, have been computed.
    model.model.layers[1].register_forward_pre_hook(fail)
    waiting = dict(enumerate(wanted))
    states: dict[int, Any] = {}
    done: dict[int, Completion] = {}
    while len(done) < len(wanted):
        running = [*states.values()]
        cancelled = stepper.start(Prompt([3, 4, 5], max_tokens=9))
        for i in [*waiting][:2]:
            states[i] = stepper.start(waiting.pop(i))
        failing = True
        with pytest.raises(torch.OutOfMemoryError, match="planted"):
            stepper.step([*running, cancelled, *[*states.values()][len(running) :]])
        failing = False
        stepper.stop(cancelled)
        order = [*states]
        for half in (order[len(order) // 2 :], order[: len(order) // 2]):
            parts = stepper.step([states[i] for i in half])
            for i, part in zip(half, parts, strict=True):
                if isinstance(part, Done):
                    done[i] = part.result
                    stepper.stop(states.pop(i))
    assert [ids(done[i].tokens) for i in range(6)] == [generate(model, each) for each in wanted]


def test_nan_fails_its_own_request_and_reaches_no_other() -> None:
    model = tiny()
    with torch.no_grad():
        model.model.embed_tokens.weight[5] = math.nan
    stepper = CausalLM(model)
    healthy = [Prompt([9] * n, max_tokens=12) for n in (30, 4, 3)]
    expected = [generate(model, each) for each in healthy]
    mate = stepper.start(healthy[0])
    bad = [
        stepper.start(Prompt([9, 9, 5, 9, 9], max_tokens=9)),
        stepper.start(Prompt([5] * 20, max_tokens=9, temperature=1.0, top_p=0.5)),
    ]
    tokens, *failures = stepper.step([mate, *bad])
    assert isinstance(tokens, Token)
    assert all(isinstance(failure, FloatingPointError) for failure in failures)
    for state in bad:
        stepper.stop(state)
    states = [mate, *map(stepper.start, healthy[1:])]  # in the slots of the bad ones
    results: dict[int, list[int]] = {}
    while len(results) < 3:
        running = [i for i in range(3) if i not in results]
        for i, part in zip(running, stepper.step([states[i] for i in running]), strict=True):
            if isinstance(part, Done):
                results[i] = ids(part.result.tokens)
    assert [results[i] for i in range(3)] == expected


def test_drawn_tokens_depend_on_the_seed_only() -> None:
    model = tiny()
    drawn: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9, "ignore_eos": True}
    wanted = [Prompt([3] * (1 + 5 * i), max_tokens=12, seed=i % 2, **drawn) for i in range(8)]
    alone = [serve(CausalLM(model), [each])[0] for each in wanted]
    together = serve(CausalLM(model, prefill_tokens=16), wanted)
    assert [ids(done.tokens) for done in together] == [ids(done.tokens) for done in alone]
    other = serve(CausalLM(model), [Prompt([3], max_tokens=12, seed=2, **drawn)])
    assert ids(other[0].tokens) != ids(alone[0].tokens)
    unseeded = [Prompt([3], max_tokens=12, **drawn)] * 4
    assert len({tuple(ids(done.tokens)) for done in serve(CausalLM(model), unseeded)}) == 4


@pytest.mark.parametrize(
    ("options", "warpers"),
    [
        ({"temperature": 2.0}, []),
        ({"temperature": 3.0, "top_k": 4}, [TopKLogitsWarper(4)]),
        ({"temperature": 3.0, "top_p": 0.6}, [TopPLogitsWarper(0.6)]),
        (
            {"temperature": 4.0, "top_k": 9, "top_p": 0.8},
            [TopKLogitsWarper(9), TopPLogitsWarper(0.8)],
        ),
        ({"temperature": 1.0, "top_p": 1e-6}, [TopKLogitsWarper(1)]),
        ({"temperature": 1.0, "top_k": 500}, []),
    ],
    ids=["temperature", "top_k", "top_p", "both", "tiny top_p", "large top_k"],
)
def test_tokens_are_drawn_from_the_distribution_of_transformers(
    options: dict[str, Any], warpers: list[Any]
) -> None:
    model = tiny()
    count = 2000
    stepper = CausalLM(model, prefill_tokens=2 * count)
    states = [
        stepper.start(Prompt([8, 9], max_tokens=2, seed=seed, **options)) for seed in range(count)
    ]
    drawn = Counter(part.id for part in stepper.step(states) if isinstance(part, Token))
    drawn[END] += count - drawn.total()
    with torch.inference_mode():
        scores = model(torch.tensor([[8, 9]])).logits[0, -1:] / options["temperature"]
    for warper in warpers:
        scores = warper(None, scores)
    expected = scores.softmax(-1)[0]
    for token, chance in enumerate(expected.tolist()):
        spread = math.sqrt(count * chance * (1 - chance))
        assert abs(drawn[token] - count * chance) <= 4.5 * spread


@pytest.mark.parametrize("options", [{}, {"top_k": 5}, {"top_p": 0.5}], ids=str)
def test_extreme_draws_take_a_token_that_has_a_probability(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny()
    monkeypatch.setattr(random.Random, "random", lambda _: 1 - 2**-53)  # rounds to 1 in float32
    prompt = Prompt([3, 4], max_tokens=1, temperature=1e-40, **options)
    stepper = CausalLM(model)
    [done] = stepper.step([stepper.start(prompt)])
    assert isinstance(done, Done)
    assert ids(done.result.tokens) == generate(model, prompt)


def test_log_probabilities() -> None:
    model = tiny()
    [done] = serve(CausalLM(model), [Prompt([3, 4], max_tokens=5, logprobs=3, ignore_eos=True)])
    whole = torch.tensor([[3, 4, *ids(done.tokens)]])
    with torch.inference_mode():
        expected = model(whole).logits[0, 1:-1].log_softmax(-1)
    for token, logprobs in zip(done.tokens, expected, strict=True):
        values, tokens = logprobs.topk(3)
        assert token.logprob == pytest.approx(float(logprobs[token.id]), abs=1e-4)
        assert token.top_logprobs is not None
        assert [each for each, _ in token.top_logprobs] == tokens.tolist()
        assert [value for _, value in token.top_logprobs] == pytest.approx(
            values.tolist(), abs=1e-4
        )
    [plain] = serve(CausalLM(model), [Prompt([3, 4], max_tokens=1)])
    assert plain.tokens[0].logprob is None
    [one] = serve(CausalLM(model), [Prompt([3, 4], max_tokens=1, logprobs=0)])
    assert one.tokens[0].logprob == pytest.approx(done.tokens[0].logprob, abs=1e-4)
    assert one.tokens[0].top_logprobs == ()


# Text

TOKENIZER = byte_tokenizer()


def say(text: str, end: bool = True, **options: Any) -> Completion:
    """What is made of a model that says `text` after ">"."""
    script = TOKENIZER(">" + text).input_ids + [1] * end
    stepper = CausalLM(speaker(script, len(TOKENIZER)), TOKENIZER)
    options = {"max_tokens": len(script) - 1} | options
    return serve(stepper, [Prompt(">", **options)])[0]


def test_characters_of_several_tokens_come_whole() -> None:
    done = say("naïve 日本 🦊!")
    assert done.text == "naïve 日本 🦊!"
    assert [token.text for token in done.tokens if token.text] == list("naïve 日本 🦊!")
    assert (done.finish_reason, done.prompt_tokens) == ("stop", 1)
    assert done.tokens[-1] == Token(1, "", finish_reason="stop")
    assert {token.finish_reason for token in done.tokens[:-1]} == {None}


def test_a_prompt_may_end_and_a_model_may_write_within_a_character() -> None:
    fox = TOKENIZER("🦊").input_ids
    script = [*fox, *fox[:2], *TOKENIZER("a").input_ids, *fox[1:], 1]
    stepper = CausalLM(speaker(script, len(TOKENIZER)), TOKENIZER)
    [done] = serve(stepper, [Prompt(fox[:2], max_tokens=len(script) - 2)])
    assert done.text == "�a"
    assert len(done.tokens) == len(script) - 2


@pytest.mark.parametrize(
    ("text", "stop", "expected", "reason"),
    [
        ("one STOP two", "STOP", "one ", "stop"),
        ("one STOP two", ["two", "TOP"], "one S", "stop"),
        ("one STAY", ["STOP"], "one STAY", "stop"),  # by the end-of-sequence token
        ("STOP", ["STOP"], "", "stop"),
        ("aab", ["ab"], "a", "stop"),
        ("日本", ["本"], "日", "stop"),
    ],
)
def test_stop_strings(text: str, stop: Any, expected: str, reason: str) -> None:
    done = say(text, stop=stop)
    assert (done.text, done.finish_reason) == (expected, reason)
    assert "".join(token.text for token in done.tokens) == expected


def test_what_a_stop_string_held_back_comes_at_the_end() -> None:
    done = say("one STAY", stop=["STOP"], max_tokens=6)
    assert (done.text, done.finish_reason) == ("one ST", "length")
    assert [token.text for token in done.tokens] == [*"one ", "", "ST"]


def test_text_may_go_on_after_the_end_token() -> None:
    script = [*TOKENIZER(">a").input_ids, 1, *TOKENIZER("b").input_ids]
    stepper = CausalLM(speaker(script, len(TOKENIZER)), TOKENIZER)
    [done] = serve(stepper, [Prompt(">", max_tokens=3, ignore_eos=True)])
    assert (done.text, done.finish_reason, len(done.tokens)) == ("ab", "length", 3)


# With `ContinuousBatcher`


@pytest.mark.anyio
async def test_streams_of_a_batcher() -> None:
    model = tiny()
    wanted = prompts(20, seed=4)
    streamed: dict[int, list[Token]] = {}

    async with ContinuousBatcher(CausalLM(model), max_batch_size=4) as batcher:

        async def read(i: int) -> None:
            streamed[i] = [token async for token in batcher.stream(wanted[i])]

        async with anyio.create_task_group() as group:
            for i in range(len(wanted)):
                group.start_soon(read, i)
    assert [ids(streamed[i]) for i in range(20)] == [generate(model, each) for each in wanted]


@pytest.mark.asyncio
async def test_replicas_preempted_by_their_memory() -> None:
    model = tiny()
    wanted = prompts(20, seed=5)
    async with (
        aiopar.ReplicaPool(model, ["cpu", "cpu"]) as pool,
        ContinuousBatcher(pool, stepper=CausalLM, max_batch_cost=80) as batcher,
    ):
        completions = await asyncio.gather(*map(batcher, wanted))
        assert batcher.stats().preempted
    assert [ids(done.tokens) for done in completions] == [generate(model, each) for each in wanted]


@pytest.mark.slow
def test_real_weights() -> None:
    folder = smollm2()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    questions = ["What is the capital of France?", "Name a fruit.", "Say it in Japanese: hello."]
    wanted = [
        Prompt(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": question}],
                add_generation_prompt=True,
                return_dict=False,
            ),
            max_tokens=12,
        )
        for question in questions * 2
    ]

    async def complete() -> list[Completion]:
        stepper = CausalLM(model, tokenizer, prefill_tokens=64)
        async with ContinuousBatcher(stepper, max_batch_size=4) as batcher:
            return [*await asyncio.gather(*map(batcher, wanted))]

    completions = asyncio.run(complete())
    assert completions[0].text == "The capital of France is Paris."
    assert [ids(done.tokens) for done in completions] == [generate(model, each) for each in wanted]


# What is refused


def _tiny_of(name: str, **options: Any) -> Any:
    """A tiny model of a family that `CausalLM` refuses."""
    known = {"vocab_size": 97, "hidden_size": 32, "d_model": 32, "num_layers": 1, "num_heads": 2}
    known |= {"n_layer": 1, "n_head": 2, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = getattr(transformers, f"{name}Config")(**known | options)
    suffix = {"T5": "ForConditionalGeneration", "Bert": "LMHeadModel"}.get(name, "ForCausalLM")
    return getattr(transformers, name + suffix)(config).eval()


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: _tiny_of("Bloom"), ValueError, "BloomForCausalLM: .* position"),
        (lambda: tiny("Falcon", alibi=True), ValueError, "FalconForCausalLM: .*ALiBi"),
        (lambda: _tiny_of("Mamba"), ValueError, "MambaForCausalLM: .* state"),
        (lambda: _tiny_of("RecurrentGemma"), ValueError, "RecurrentGemmaForCausalLM: .* state"),
        (
            lambda: _tiny_of("Lfm2", layer_types=["conv"], num_key_value_heads=2),
            ValueError,
            "Lfm2ForCausalLM: .* state",
        ),
        (lambda: _tiny_of("T5", d_kv=8, d_ff=8), ValueError, "T5.* encoder"),
        (lambda: _tiny_of("Bert", intermediate_size=8), ValueError, "Bert.* later tokens"),
        (lambda: _tiny_of("Roberta", intermediate_size=8), ValueError, "Roberta.* later tokens"),
        (
            lambda: _tiny_of("GPTNeo", attention_types=[[["local"], 1]]),
            ValueError,
            "GPTNeoForCausalLM: .* attention",
        ),
        (
            lambda: tiny(attn_implementation="flex_attention"),
            ValueError,
            "attn_implementation='sdpa', not 'flex_attention'",
        ),
        (lambda: tiny().train(), ValueError, r"training mode: call model.eval\(\)"),
        (lambda: tiny().model, TypeError, "causal language model of transformers, not LlamaModel"),
        (lambda: torch.nn.Linear(1, 1), TypeError, "not Linear"),
    ],
    ids=lambda value: None if callable(value) else str(value),
)
def test_models_that_cannot_run_are_refused(make: Any, error: type[Exception], words: str) -> None:
    model = make()
    with pytest.raises(error, match=words):
        CausalLM(model)


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="prefill_tokens must be at least 1"):
        CausalLM(tiny(), prefill_tokens=0)
    with pytest.raises(TypeError, match="tokenizer must be a PreTrainedTokenizerBase, not str"):
        CausalLM(tiny(), "gpt2")


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"prompt": 3}, TypeError, "prompt must be text or a sequence of token ids, got int"),
        ({"prompt": [1.5]}, TypeError, "token ids, got list of 1: float"),
        ({"prompt": b"text"}, TypeError, "token ids, got bytes"),
        ({"prompt": torch.ones(1, 2).long()}, TypeError, r"token ids, got Tensor int64 \[1, 2\]"),
        (
            {"prompt": BatchEncoding({"input_ids": [3]})},
            TypeError,
            "got BatchEncoding .input_ids",
        ),
        ({"max_tokens": 0}, ValueError, "max_tokens must be at least 1, got 0"),
        ({"temperature": -1}, ValueError, "temperature must be at least 0"),
        ({"temperature": math.inf}, ValueError, "temperature must be finite"),
        ({"top_k": -1}, ValueError, "top_k must be at least 0"),
        ({"top_p": 0}, ValueError, "top_p must be above 0"),
        ({"top_p": 1.1}, ValueError, "top_p must be at most 1"),
        ({"stop": ["a", ""]}, ValueError, "stop must be strings that are not empty"),
        ({"stop": [3]}, TypeError, "stop must be"),
        ({"seed": "x"}, TypeError, "seed must be an int"),
        ({"logprobs": True}, TypeError, "logprobs must be an int, not bool"),
    ],
)
def test_bad_prompts_are_refused(
    options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        Prompt(**{"prompt": [3]} | options)


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        (Prompt([]), "the prompt has no tokens"),
        (Prompt([3, VOCABULARY]), "token ids must be from 0 to 96"),
        (Prompt([-1]), "token ids must be from 0 to 96"),
        (Prompt([3] * 100, max_tokens=29), "100 tokens, and max_tokens is 29: .* 128 tokens"),
        (Prompt("text"), "need a tokenizer"),
        (Prompt([3], stop="."), "need a tokenizer"),
    ],
    ids=["empty", "above", "below", "long", "text", "stop"],
)
def test_prompts_that_the_model_cannot_take_are_refused(prompt: Prompt, words: str) -> None:
    stepper = CausalLM(tiny())
    with pytest.raises(InvalidInput, match=words):
        stepper.start(prompt)


def test_an_item_of_another_type_is_refused() -> None:
    with pytest.raises(TypeError, match=r"needs aiopar.transformers.Prompt, not str"):
        CausalLM(tiny()).start("text")  # type: ignore[arg-type]  # on purpose


def test_positions_that_change_with_the_longest_row_bound_the_context() -> None:
    with pytest.raises(InvalidInput, match="the model's context of 64 tokens"):
        CausalLM(tiny("Phi3")).start(Prompt([3] * 60, max_tokens=5))
