"""The quickstart, on real weights and few paragraphs, and its encoder against the reference."""

import asyncio
import re
from types import SimpleNamespace

import pytest
import torch

import aiopar
from examples import quickstart


@pytest.fixture(scope="module")
def encoder() -> quickstart.SentenceEncoder:
    return quickstart.SentenceEncoder()


def test_it_prints_rates_heartbeats_and_the_nearest_paragraphs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    quickstart.main(["--limit", "8", "--question", "What does a decorator do?"])
    printed = capsys.readouterr().out
    for way in ("batches of 32, split", "one by one, on a free device"):
        [numbers] = re.findall(rf"^{way}((?: +-?[\d.]+)+)$", printed, re.MULTILINE)
        plain, awaited, ratio, p99, worst = map(float, numbers.split())
        assert min(plain, awaited, ratio) > 0
        assert p99 <= worst
    scores = [float(score) for score in re.findall(r"^ +(-?[01]\.\d\d)  ", printed, re.MULTILINE)]
    assert len(scores) == 5
    assert scores == sorted(scores, reverse=True)


def test_nearest_finds_what_means_the_same(encoder: quickstart.SentenceEncoder) -> None:
    texts = [
        "Bread is baked in an oven.",
        "A lock keeps other threads out while it is held.",
        "The train to the coast leaves in the morning.",
    ]
    embeddings = encoder.embed(texts)
    question = "How do I protect shared data from concurrent access?"
    found = asyncio.run(quickstart.nearest(encoder, embeddings, question))
    assert found[0][1] == 1
    assert len(found) == 3


def test_embeddings_are_unit_vectors_whatever_the_padding(
    encoder: quickstart.SentenceEncoder,
) -> None:
    texts = ["Short.", "A sentence that has a good many more tokens than the other one has."]
    together = encoder.embed(texts)
    apart = torch.cat([encoder.embed([text]) for text in texts])
    torch.testing.assert_close(together, apart)
    torch.testing.assert_close(together.norm(dim=1), torch.ones(2))


def test_the_paragraphs_are_as_many_as_asked_for_and_in_order_of_length() -> None:
    manual = quickstart.read_manual(50)
    lengths = [len(text) for text, _ in manual]
    assert len(manual) == len({text for text, _ in manual}) == 50
    assert lengths == sorted(lengths)
    assert len(quickstart.read_manual(10**6)) > 200


@pytest.mark.asyncio
async def test_a_heartbeat_counts_the_beat_that_was_held_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    monkeypatch.setattr(quickstart, "time", SimpleNamespace(perf_counter=lambda: now))

    async def block_the_loop() -> None:
        nonlocal now
        await asyncio.sleep(0)  # the first beat starts
        now += 0.5

    _, seconds, late = await quickstart.timed(block_the_loop())
    assert seconds == 0.5
    assert late.split() == ["499.0", "499.0"]  # it sleeps 1 ms of them


@pytest.mark.asyncio
async def test_an_error_ends_the_heartbeat_and_comes_out() -> None:
    async def fail() -> None:
        await aiopar.run_sync(torch.ones, -1)

    with pytest.raises(RuntimeError, match="negative dimension"):
        await quickstart.timed(fail())
    assert asyncio.all_tasks() == {asyncio.current_task()}
