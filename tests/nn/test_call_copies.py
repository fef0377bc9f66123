"""Copies that a call gives back: another has them only if nobody can tell."""

import copy
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from aiopar.nn import _kept_replicas
from aiopar.nn._kept_replicas import KeptReplicas
from tests.nn.kept import model
from tests.nn.sample_modules import CPU, FACTORIES, batch, make

Change = Callable[[Any], object]


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    """Replicas are kept outside grad mode alone."""
    with torch.no_grad():
        yield


def sample() -> Any:
    module: Any = model().eval()
    module.register_buffer("hidden", torch.ones(1), persistent=False)
    module[0].register_forward_hook(_pass)
    module[3].extra = nn.Parameter(torch.ones(1))
    module[3].first, module[3].last = object(), torch.ones(1)
    return module


def _pass(_module: Any, _args: Any, out: Any) -> Any:
    return out


def keep() -> KeptReplicas[Any]:
    return KeptReplicas(sample(), [CPU, CPU])


def again(kept: KeptReplicas[Any], change: Change = lambda _: None) -> bool:
    """Whether a call has the copies of the call before, which did `change` to one of them."""
    replicas = kept.call_copies()
    before = weakref.ref(replicas[1])
    change(replicas[1])
    kept.give_back(replicas)
    del replicas
    return kept.call_copies()[1] is before()


def _swap(d: dict[str, Any], old: str, new: str) -> None:
    d[new] = d.pop(old)


def _move_to_buffers(m: Any) -> None:
    m[3]._buffers["extra"] = m[3]._parameters.pop("extra")


def _hide_another(m: Any) -> None:
    m._non_persistent_buffers_set.remove("hidden")
    m._non_persistent_buffers_set.add("other")


CHANGES: dict[str, Change] = {
    "new attribute": lambda m: setattr(m[3], "seen", 1),
    "replaced attribute": lambda m: setattr(m[3], "first", object()),
    "equal, not the same": lambda m: setattr(m[3], "last", torch.ones(1)),
    "renamed attribute": lambda m: _swap(m[3].__dict__, "last", "final"),
    "deleted attribute": lambda m: delattr(m[3], "first"),
    "all of __dict__": lambda m: setattr(m[3], "__dict__", m[3].__dict__.copy()),
    "class": lambda m: setattr(m[2], "__class__", nn.AlphaDropout),
    "mode": lambda m: m[2].train(),
    "replaced parameter": lambda m: setattr(m[3], "bias", nn.Parameter(torch.ones(2))),
    "deleted parameter": lambda m: setattr(m[3], "bias", None),
    "renamed parameter": lambda m: _swap(m[3]._parameters, "extra", "offset"),
    "a parameter becomes a buffer": _move_to_buffers,
    "replaced buffer": lambda m: setattr(m[1], "running_mean", torch.zeros(4)),
    "replaced submodule": lambda m: m.__setitem__(2, nn.Identity()),
    "renamed submodule": lambda m: _swap(m._modules, "3", "last"),
    "new hook": lambda m: m[1].register_forward_hook(_pass),
    "one hook more": lambda m: m[0].register_forward_pre_hook(lambda *_: None),
    "hooks taken off": lambda m: m[0]._forward_hooks.clear(),
    "replaced hook": lambda m: m[0]._forward_hooks.update(
        dict.fromkeys(m[0]._forward_hooks, lambda *_: None)
    ),
    "replaced hooks": lambda m: setattr(m[1], "_forward_hooks", m[1]._forward_hooks.copy()),
    "what is persistent": _hide_another,
}


def test_unchanged_copies_are_those_of_the_next_call() -> None:
    kept = keep()
    for _ in range(5):
        assert again(kept, lambda m: m(batch()))


@pytest.mark.parametrize("change", CHANGES)
def test_a_call_that_changes_its_copies_has_them_alone(change: str) -> None:
    kept = keep()
    expected = kept.module(batch())
    looks = [copy.copy(vars(module)) for module in kept.call_copies()[1].modules()]
    assert not again(kept, CHANGES[change])
    replica = kept.call_copies()[1]
    assert torch.equal(replica(batch()), expected)
    assert [vars(m).keys() for m in replica.modules()] == [fields.keys() for fields in looks]


@pytest.mark.parametrize("change", CHANGES)
def test_copies_are_of_the_original_as_it_is_now(change: str) -> None:
    kept, changed = keep(), sample()
    assert again(kept)
    CHANGES[change](kept.module)
    CHANGES[change](changed)
    for replica in kept.call_copies():
        torch.testing.assert_close(replica(batch()), kept.module(batch()))
        for ours, theirs in zip(replica.modules(), changed.modules(), strict=True):
            added = {"_is_replica", "_former_parameters"}
            assert vars(ours).keys() - added == vars(theirs).keys()
            assert type(ours) is type(theirs)
            for name in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
                assert list(vars(ours)[name]) == list(vars(theirs)[name])
            for name in ("_forward_hooks", "_forward_pre_hooks"):
                assert len(vars(ours)[name]) == len(vars(theirs)[name])


@pytest.mark.parametrize("change", CHANGES)
def test_of_an_original_that_changes_during_the_call_they_are_not_kept(change: str) -> None:
    kept = keep()
    assert again(kept)
    assert not again(kept, lambda _: CHANGES[change](kept.module))


def test_a_copy_that_somebody_refers_to_is_left_to_them() -> None:
    kept = keep()
    found: list[Any] = []
    assert not again(kept, found.append)
    assert not again(kept, lambda m: found.append(m[0]))
    assert again(kept, lambda m: found.append(m[0].weight)), "tensors are shared anyway"


def test_what_a_call_has_set_lives_no_longer_than_the_call() -> None:
    kept = keep()
    replicas = kept.call_copies()
    replicas[0].seen = seen = torch.ones(1)
    alive = weakref.ref(seen)
    kept.give_back(replicas)
    del seen, replicas
    assert alive() is None


def test_calls_at_once_have_copies_of_their_own() -> None:
    kept = keep()
    calls = [kept.call_copies() for _ in range(4)]
    everyone = {id(replica) for replicas in calls for replica in replicas}
    assert len(everyone) == 8
    alive = [weakref.ref(replicas[0]) for replicas in calls]
    while calls:
        kept.give_back(calls.pop())
    spare = [ref() is not None for ref in alive]
    assert sum(spare) == _kept_replicas._MAX_SPARE


def test_where_copies_are_always_changed_none_are_kept() -> None:
    kept = keep()
    for _ in range(_kept_replicas._MAX_IN_VAIN):
        assert not again(kept, CHANGES["new attribute"])
    assert not again(kept), "nobody looks any more"
    kept.refresh()
    assert again(kept)


def test_where_weights_are_always_changed_none_are_kept() -> None:
    module = model().train()  # each call changes the buffers of replica 1
    kept = KeptReplicas(module, [CPU, CPU])
    for _ in range(_kept_replicas._MAX_IN_VAIN + 1):
        assert not again(kept, lambda m: m(batch()))
    assert kept._original is None


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_a_module_with_its_own_way_to_be_copied_is_copied_each_time(kind: str) -> None:
    assert kind in FACTORIES
    assert not again(KeptReplicas(make(kind).eval(), [CPU, CPU]))
