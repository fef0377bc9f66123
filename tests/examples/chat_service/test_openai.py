"""OpenAI's own client, with the service as its base URL."""

import json
from functools import partial
from typing import Any

import openai
import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam
from tokenizers import Tokenizer

from examples.chat_service.schemas import CONTEXT, MAX_CHOICES, MODEL, VOCABULARY
from examples.chat_service.weights import smollm2

CAPITAL: list[ChatCompletionMessageParam] = [
    {"role": "user", "content": "What is the capital of France?"}
]
REPLY = "The capital of France is Paris."


def chat(client: OpenAI, **options: Any) -> Any:
    """The answer to a question; the same one each time, unless the options say otherwise."""
    defaults: dict[str, Any] = {"model": MODEL, "messages": CAPITAL, "temperature": 0}
    return client.chat.completions.create(**defaults | options)


def text(client: OpenAI, **options: Any) -> Any:
    """What follows a text; the same each time."""
    return client.completions.create(model=MODEL, temperature=0, **options)


def test_a_conversation_gets_its_reply(client: OpenAI) -> None:
    completion = chat(client)
    [choice] = completion.choices
    assert (choice.index, choice.message.role, choice.message.content) == (0, "assistant", REPLY)
    assert choice.finish_reason == "stop"
    assert choice.logprobs is None
    assert (completion.object, completion.model) == ("chat.completion", MODEL)
    assert completion.usage.total_tokens == completion.usage.prompt_tokens + 8


def test_a_system_message_and_parts_of_a_text_are_read(client: OpenAI) -> None:
    parts = [{"type": "text", "text": "What is the "}, {"type": "text", "text": "capital?"}]
    whole = {"role": "user", "content": "What is the capital?"}
    lengths = [
        chat(client, messages=messages, max_tokens=1).usage.prompt_tokens
        for messages in (
            [whole],
            [{"role": "user", "content": parts}],
            [{"role": "system", "content": "Answer in one word."}, whole],
            [{"role": "developer", "content": "Answer in one word."}, whole],
        )
    ]
    assert lengths[0] == lengths[1] != lengths[2] == lengths[3]


def test_a_stream_has_the_same_text_as_the_whole_answer(client: OpenAI) -> None:
    ask = partial(chat, client, temperature=1, seed=3, max_tokens=10)
    whole = ask()
    chunks = [*ask(stream=True, stream_options={"include_usage": True})]
    *parts, last = chunks
    [choice] = whole.choices
    assert "".join(part.choices[0].delta.content for part in parts) == choice.message.content
    assert [part.choices[0].delta.role for part in parts] == ["assistant", *[None] * 9]
    assert [part.choices[0].finish_reason for part in parts] == [*[None] * 9, "length"]
    assert (last.choices, last.usage) == ([], whole.usage)
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(part.usage is None for part in parts)


def test_n_answers_differ_and_say_whose_each_part_is(client: OpenAI) -> None:
    whole = chat(client, n=3, seed=1, temperature=2, max_tokens=6)
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in whole.choices}) == 3
    assert whole.usage.completion_tokens == 18
    texts = ["", "", ""]
    for chunk in chat(client, n=3, stream=True):
        [choice] = chunk.choices
        texts[choice.index] += choice.delta.content
    assert texts == [REPLY] * 3


def test_stop_strings_end_the_text(client: OpenAI) -> None:
    [choice] = chat(client, stop=["Lyon", " is"]).choices
    assert (choice.message.content, choice.finish_reason) == ("The capital of France", "stop")
    *_, last = chat(client, stop=" of", max_tokens=3, stream=True)  # where max_tokens ends it too
    assert last.choices[0].finish_reason == "stop"


def test_logprobs_have_an_entry_for_each_token(client: OpenAI) -> None:
    ask = partial(chat, client, max_tokens=4)
    [choice] = ask(logprobs=True, top_logprobs=2).choices
    entries = choice.logprobs.content
    assert "".join(entry.token for entry in entries) == "The capital of France"
    for entry in entries:
        best, second = entry.top_logprobs
        assert (best.token, best.logprob) == (entry.token, entry.logprob)
        assert best.bytes == [*entry.token.encode()]
        assert 0 >= best.logprob > second.logprob
    chunks = [*ask(logprobs=True, stream=True)]
    streamed = [chunk.choices[0].logprobs.content[0] for chunk in chunks]
    assert [entry.token for entry in streamed] == [entry.token for entry in entries]
    assert [entry.top_logprobs for entry in streamed] == [[]] * 4


def test_texts_and_tokens_are_continued(client: OpenAI) -> None:
    tokenizer = Tokenizer.from_file(str(smollm2() / "tokenizer.json"))
    tale, count = "Once upon a time", "1, 2, 3,"
    tokens = tokenizer.encode(tale).ids
    ask = partial(text, client, max_tokens=4)
    one = ask(prompt=tale)
    assert one.object == "text_completion"
    assert ask(prompt=tokens).choices == one.choices
    assert one.usage.prompt_tokens == len(tokens)

    several = ask(prompt=[tale, count], n=2)
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    assert several.choices[0].text == several.choices[1].text == one.choices[0].text
    assert several.choices[2].text == several.choices[3].text == " 4, "
    streamed = "".join(chunk.choices[0].text for chunk in ask(prompt=[tokens], stream=True))
    assert streamed == one.choices[0].text


def test_logprobs_of_a_text_have_an_entry_for_each_token(client: OpenAI) -> None:
    completion = text(client, prompt="1, 2, 3,", max_tokens=3, logprobs=2)
    found = completion.choices[0].logprobs
    assert "".join(found.tokens) == completion.choices[0].text
    for token, logprob, top in zip(
        found.tokens, found.token_logprobs, found.top_logprobs, strict=True
    ):
        assert len(top) == 2
        assert top[token] == logprob == max(top.values())


def test_its_model_is_listed(client: OpenAI) -> None:
    [listed] = client.models.list()
    assert listed == client.models.retrieve(MODEL)
    assert listed.id == MODEL


def test_other_models_do_not_exist(client: OpenAI) -> None:
    for ask in (
        client.models.retrieve,
        partial(client.chat.completions.create, messages=CAPITAL),
        partial(client.completions.create, prompt="x"),
    ):
        with pytest.raises(openai.NotFoundError, match="'org/gpt' does not exist") as refused:
            ask(model="org/gpt")
        assert (refused.value.code, refused.value.param) == ("model_not_found", "model")


@pytest.mark.parametrize("stream", [False, True])
def test_more_than_the_context_is_refused(client: OpenAI, stream: bool) -> None:
    for field, ask in (
        ("messages", partial(client.chat.completions.create, messages=CAPITAL)),
        ("prompt", partial(client.completions.create, prompt="x")),
    ):
        with pytest.raises(openai.BadRequestError, match=f"has {CONTEXT} tokens") as refused:
            ask(model=MODEL, max_tokens=CONTEXT, stream=stream)
        assert (refused.value.code, refused.value.param) == ("context_length_exceeded", field)


CHAT, TEXT = "/chat/completions", "/completions"


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        (CHAT, {"messages": []}, "messages", "at least 1 item"),
        (CHAT, {}, "messages", "Field required"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content", "Field required"),
        (CHAT, {"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", "'system'"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content",
            "only text",
        ),
        (CHAT, {"messages": CAPITAL, "tools": [{}]}, "tools", "does not have it"),
        (CHAT, {"messages": CAPITAL, "top_logprobs": 21}, "top_logprobs", "equal to 20"),
        (TEXT, {"prompt": ""}, "prompt[0]", "at least 1 character"),
        (TEXT, {"prompt": []}, "prompt", "at least 1 item"),
        (TEXT, {"prompt": [[5], [5, VOCABULARY]]}, "prompt[1][1]", "less than"),
        (TEXT, {"prompt": ["x", 5]}, "prompt[1]", "valid string"),
        (TEXT, {"prompt": "x", "max_tokens": 0}, "max_tokens", "equal to 1"),
        (TEXT, {"prompt": "x", "max_tokens": CONTEXT + 1}, "max_tokens", "equal to 2048"),
        (TEXT, {"prompt": "x", "temperature": 2.1}, "temperature", "equal to 2"),
        (TEXT, {"prompt": "x", "top_p": 0}, "top_p", "greater than 0"),
        (TEXT, {"prompt": "x", "stop": ["a"] * 5}, "stop", "at most 4 items"),
        (TEXT, {"prompt": "x", "stop": ""}, "stop[0]", "at least 1 character"),
        (TEXT, {"prompt": "x", "presence_penalty": 1}, "presence_penalty", "does not have it"),
        (TEXT, {"prompt": "x", "best_of": 2}, "best_of", "1"),
        (TEXT, {"prompt": ["x"] * 2, "n": MAX_CHOICES}, "n", f"At most {MAX_CHOICES} choices"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_what_does_not_fit_is_a_bad_request(
    client: OpenAI, path: str, body: dict[str, Any], param: str, message: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.post(path, body={"model": MODEL} | body, cast_to=object)
    error = refused.value
    assert (error.type, error.param, error.code) == ("invalid_request_error", param, None)
    assert message in error.message


def test_null_is_the_default(client: OpenAI) -> None:
    names = "max_tokens temperature top_p n stop seed stream stream_options logit_bias logprobs"
    body: dict[str, Any] = {"model": MODEL, "prompt": "x", **dict.fromkeys(names.split())}
    found = client.post(TEXT, body=body, cast_to=openai.types.Completion)
    assert found.usage is not None
    assert found.usage.completion_tokens <= 16  # as in OpenAI's API


@pytest.mark.parametrize(
    "body",
    [b"{", b'{"prompt": "\xff"}', b'{"model": "\\ud800"}', b'{"prompt": NaN}', b"[]", b""],
    ids=repr,
)
def test_what_cannot_be_read_is_a_bad_request(client: OpenAI, body: bytes) -> None:
    headers = {"content-type": "application/json"}
    with pytest.raises(openai.BadRequestError) as refused:
        client.post(TEXT, content=body, cast_to=object, options={"headers": headers})
    assert refused.value.type == "invalid_request_error"
    assert refused.value.param is None or refused.value.param.isidentifier()


def test_half_of_a_surrogate_pair_is_no_text(client: OpenAI) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "\ud800"}]}
    headers = {"content-type": "application/json"}
    options: Any = {"content": json.dumps(body).encode(), "options": {"headers": headers}}
    with pytest.raises(openai.BadRequestError) as refused:
        client.post(CHAT, cast_to=object, **options)
    assert refused.value.param == "messages[0].content"


def test_an_unknown_path_is_told_in_the_same_form(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as refused:
        client.embeddings.create(model=MODEL, input="x")
    assert (refused.value.type, refused.value.code) == ("invalid_request_error", None)
