"""Modules that log their replication callbacks, or fail in one."""

from typing import NamedTuple

from torch import Tensor, nn

import aiopar


class Call(NamedTuple):
    name: str
    copy_id: int
    ctx: aiopar.CallbackContext


class Logged(nn.Module):
    """Logs callbacks in a list that its copies share; forward adds the id of the copy."""

    def __init__(self, name: str = "", log: list[Call] | None = None) -> None:
        super().__init__()
        self.name = name
        self.log = [] if log is None else log
        self.copy_id = -1

    def __data_parallel_replicate__(self, ctx: aiopar.CallbackContext, copy_id: int) -> None:
        self.log.append(Call(self.name, copy_id, ctx))
        self.copy_id = copy_id

    def forward(self, x: Tensor) -> Tensor:
        return x + self.copy_id

    @property
    def copy_ids(self) -> list[int]:
        return [call.copy_id for call in self.log]

    @property
    def contexts(self) -> set[aiopar.CallbackContext]:
        return {call.ctx for call in self.log}


class Fails(nn.Identity):
    def __init__(self, copy_id: int = 1) -> None:
        super().__init__()
        self.failing: int | None = copy_id

    def __data_parallel_replicate__(self, ctx: aiopar.CallbackContext, copy_id: int) -> None:
        if copy_id == self.failing:
            raise KeyError("own")
