"""Which types mypy and pyright infer: both check this file. Values show that the types are true."""

import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, assert_type

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import aiopar
from aiopar.data import AsyncDataLoader, Pipeline, Stream
from aiopar.serve import Batcher, ModelStore, OutputStream, ReplicaPool, pad_collate

X = torch.ones(4)
CPUS = ["cpu", "cpu"]


class Scores(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"sum": x.sum(1), "mean": x.mean(1)}


class Encoder(nn.Module):
    def forward(self, ids: Tensor, scale: Tensor) -> Tensor:
        return ids * scale


class Halves(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x[:, :2], x[:, 2:]


class Count(nn.Module):
    def forward(self, x: Tensor) -> int:
        return len(x)


def tokenize(texts: list[str]) -> dict[str, Tensor]:
    lengths = torch.tensor([len(text) for text in texts])
    return {"ids": lengths, "scale": torch.ones_like(lengths)}


def double(batch: Tensor) -> Tensor:
    return 2 * batch


def lengths(words: list[str]) -> list[int]:
    return [len(word) for word in words]


def encode(tokens: dict[str, Tensor]) -> Tensor:
    return tokens["ids"] * tokens["scale"]


def halves(batch: Tensor) -> tuple[Tensor, Tensor]:
    return batch[:, :2], batch[:, 2:]


async def fetch(urls: list[str]) -> list[bytes]:
    return [url.encode() for url in urls]


async def double_later(batch: Tensor) -> Tensor:
    return 2 * batch


def countdown(batch: Tensor) -> Iterator[Tensor]:
    while (batch > 0).any():
        batch = batch - 1
        yield batch


async def spelled(words: list[str]) -> AsyncIterator[list[str]]:
    for letters in zip(*words, strict=True):
        yield list(letters)


class Spell:
    def start(self, item: str) -> list[str]:
        return list(item)

    def step(self, states: list[list[str]]) -> list[str | aiopar.Done[int] | Exception | None]:
        return [letters.pop(0) if letters else aiopar.Done(1) for letters in states]


def untyped(batch: Any) -> Any:
    return batch


@pytest.mark.asyncio
class TestBatcher:
    async def test_of_a_module(self) -> None:
        async with Batcher(nn.Linear(4, 2)) as batcher:
            y = await batcher(X)
            assert_type(y, Tensor)
            assert isinstance(y, Tensor)
        async with Batcher(Scores(), max_batch_size=8) as scores:
            scored = await scores(X)
            assert_type(scored, dict[str, Tensor])
            assert scored["sum"] == 4

    async def test_of_a_module_with_several_arguments(self) -> None:
        async with Batcher(Encoder(), collate_fn=tokenize) as batcher:
            assert_type(batcher, Batcher[str, Tensor])
            assert await batcher("four") == 4
        assert_type(Batcher(Encoder()), Batcher[Any, Tensor])

    async def test_of_a_pool(self) -> None:
        pool = ReplicaPool(Encoder(), CPUS)
        async with pool, Batcher(pool, collate_fn=tokenize, batch_key=len) as batcher:
            assert_type(batcher, Batcher[str, Tensor])
            assert await batcher("four") == 4
        assert_type(Batcher(pool), Batcher[Any, Tensor])

    async def test_of_a_function_of_tensors(self) -> None:
        async with Batcher(double) as batcher:
            assert_type(await batcher(X), Tensor)
            assert await batcher(2) == 4
        async with Batcher(double_later) as later:
            assert_type(await later(X), Tensor)
            assert await later(1.5) == 3

    async def test_of_a_function_of_lists(self) -> None:
        async with Batcher(lengths) as batcher:
            assert_type(batcher, Batcher[Any, int])
            assert await batcher("four") == 4
        async with Batcher(fetch) as fetching:
            assert_type(fetching, Batcher[Any, bytes])
            assert await fetching("four") == b"four"
        assert_type(Batcher(lengths, collate_fn=list), Batcher[Any, int])

    async def test_bodies_of_lambdas_have_no_errors(self) -> None:
        pool = ReplicaPool(Encoder(), CPUS)
        batcher = Batcher(
            pool,
            collate_fn=lambda texts: tokenize([text.strip() for text in texts]),
            batch_key=lambda text: len(text) // 8,
            cost=lambda text: 1 + len(text),
        )
        async with pool, batcher:
            assert await batcher(" four") == 4
        async with Batcher(lambda x: 2 * x.int(), batch_key=lambda x: x.shape) as doubling:
            assert (await doubling(X)).tolist() == [2, 2, 2, 2]

    async def test_of_a_generator_function(self) -> None:
        async with Batcher(countdown) as batcher:
            stream = batcher.stream(torch.tensor(2))
            assert_type(stream, OutputStream[Tensor])
            assert [part.item() async for part in stream] == [1, 0]
        async with Batcher(spelled) as spelling:
            async for part in spelling.stream("ab"):
                assert_type(part, str)
                assert part in "ab"

    async def test_of_what_has_no_types(self) -> None:
        assert_type(Batcher(untyped), Batcher[Any, Any])
        assert_type(Batcher(double, unbatch_fn=list), Batcher[Any, Any])
        assert_type(Batcher(halves), Batcher[Any, Any])
        async with (
            Batcher(lambda batch: batch.sum(1)) as sums,
            Batcher(lambda words: [word.upper() for word in words], collate_fn=list) as upper,
            Batcher(untyped, collate_fn=pad_collate) as padded,
        ):
            assert await sums(X) == 4
            assert await upper("a") == "A"
            assert len(await padded(X)) == 2

    async def test_of_a_wrong_item(self) -> None:
        async with Batcher(encode, collate_fn=tokenize) as batcher:
            with pytest.raises(TypeError):
                await batcher(4)  # type: ignore[arg-type]

    async def test_of_wrong_options(self) -> None:
        with pytest.raises(TypeError, match="max_batchsize"):
            Batcher(double, max_batchsize=8)  # type: ignore[call-overload]
        with pytest.raises(TypeError, match="max_batch_size"):
            Batcher(double, max_batch_size="8")  # type: ignore[call-overload]

    async def test_of_a_parameter(self) -> None:
        async def ask(batcher: Batcher[str, object]) -> object:
            return await batcher("four")

        async with Batcher(lengths) as batcher:
            assert await ask(batcher) == 4


@pytest.mark.asyncio
async def test_continuous_batcher_of_a_stepper() -> None:
    async with aiopar.ContinuousBatcher(Spell()) as batcher:
        assert_type(batcher, aiopar.ContinuousBatcher[str, str, Any])
        assert_type([part async for part in batcher.stream("ab")], list[str])
    named: aiopar.ContinuousBatcher[str, str, int] = aiopar.ContinuousBatcher(Spell())
    async with named:
        assert_type(await named("ab"), int)


def load(name: str) -> Batcher[Any, int]:
    return Batcher(lengths)


async def load_later(name: str) -> Batcher[Any, int]:
    return Batcher(lengths)


@pytest.mark.asyncio
class TestModelStore:
    async def test_model_is_what_load_returns(self) -> None:
        async with ModelStore(load) as store, store.use("model") as batcher:
            assert_type(store, ModelStore[Batcher[Any, int]])
            assert_type(await batcher("four"), int)
            assert await batcher("four") == 4
        async with ModelStore(load_later) as later, later.use("model") as batcher:
            assert_type(later, ModelStore[Batcher[Any, int]])
            assert await batcher("four") == 4


@pytest.mark.asyncio
class TestReplicaPool:
    async def test_of_a_module(self) -> None:
        async with ReplicaPool(Halves(), CPUS) as pool:
            assert_type(pool, ReplicaPool[tuple[Tensor, Tensor]])
            left, right = await pool(torch.ones(2, 4))
            assert left.shape == right.shape == (2, 2)


@pytest.mark.asyncio
class TestDataParallel:
    async def test_of_a_module(self) -> None:
        dp = aiopar.DataParallel(Halves(), CPUS)
        assert_type(dp, aiopar.DataParallel[tuple[Tensor, Tensor]])
        left, right = await dp(torch.ones(2, 4))
        assert left.shape == right.shape == (2, 2)

    async def test_of_outputs_that_are_no_tensors(self) -> None:
        counts = aiopar.DataParallel(Count(), CPUS)
        assert_type(counts, aiopar.DataParallel[Any])
        assert await counts(torch.ones(2, 4)) == [1, 1]


class Rows(Dataset[tuple[Tensor, int]]):
    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return X, index

    def __len__(self) -> int:
        return 3


class Untyped(Dataset[Any]):
    def __getitem__(self, index: int) -> Any:
        return X, index

    def __len__(self) -> int:
        return 3


@pytest.mark.asyncio
class TestAsyncDataLoader:
    async def test_of_declared_batches(self) -> None:
        tensors: AsyncDataLoader[Tensor] = AsyncDataLoader([X, X], batch_size=2)
        async with tensors as stream:
            async for batch in stream:
                assert_type(batch, Tensor)
                assert batch.shape == (2, 4)
        rows: AsyncDataLoader[list[Tensor]] = AsyncDataLoader(TensorDataset(X, X), 2)
        async for x, y in rows:
            assert_type(y, Tensor)
            assert x.shape == (2,)

    async def test_of_collated_samples(self) -> None:
        async for batch in AsyncDataLoader(["a", "bc"], 2, collate_fn=tokenize):
            assert_type(batch, dict[str, Tensor])
            assert batch["ids"].tolist() == [1, 2]

    async def test_of_a_misspelt_option(self) -> None:
        with pytest.raises(TypeError, match="'batchsize'"):
            AsyncDataLoader(X, batchsize=2)  # type: ignore[call-arg]  # the option is named

    async def test_of_what_has_no_types(self) -> None:
        async for chunks in AsyncDataLoader(X, 2, devices=CPUS):
            assert_type(chunks, Any)
            assert len(chunks) == 2
        theirs = DataLoader(TensorDataset(X), 2)
        assert_type(AsyncDataLoader.from_dataloader(theirs), AsyncDataLoader[Any])
        assert_type(AsyncDataLoader(Untyped()), AsyncDataLoader[Any])
        async for x, number in AsyncDataLoader(Rows(), device="cpu"):
            assert_type(number, Any)
            assert x.shape == (1, 4)


@pytest.mark.asyncio
class TestStream:
    async def test_of_map(self) -> None:
        batches = [torch.ones(2, 4)]
        async with aiopar.map(Halves(), batches, devices=["cpu"]) as outputs:
            assert_type(outputs, Stream[tuple[Tensor, Tensor]])
            assert len(await anext(outputs)) == 2
        async with Batcher(encode, collate_fn=tokenize) as b, aiopar.map(b, ["four"]) as found:
            assert_type(found, Stream[Tensor])
            assert [length async for length in found] == [4]

    async def test_of_functions(self) -> None:
        for outputs in (aiopar.map(double, [X]), aiopar.map(double_later, [X])):
            assert [assert_type(output, Tensor).tolist() async for output in outputs] == [[2.0] * 4]
        for pipeline in (Pipeline([X]).map(double), Pipeline([X]).map(double_later)):
            assert [assert_type(item, Tensor).tolist() async for item in pipeline] == [[2.0] * 4]

    async def test_of_a_pipeline(self) -> None:
        async with Pipeline(["a", "bc"]).map(len).batch(2) as stream:
            assert_type(stream, Stream[list[int]])
            assert await anext(stream) == [1, 2]


def test_pyright_agrees() -> None:
    command = [sys.executable, "-m", "basedpyright", "--pythonpath", sys.executable]
    root = Path(__file__).parent.parent
    checked = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "0 errors" in checked.stdout
