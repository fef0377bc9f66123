"""A running request: its tokens, its slot, and its text."""

import random
from collections.abc import Sequence
from typing import Any

from ._request import Prompt, Token


class Row:
    """The state of a request: its tokens, and the slot of their keys and values."""

    __slots__ = ("cached", "ids", "prompt", "seed", "slot", "text", "tokens", "written")

    def __init__(self, prompt: Prompt, ids: list[int], tokenizer: Any) -> None:
        self.prompt = prompt
        self.ids = ids  # of the prompt and of what was generated
        self.tokens: list[Token] = []
        self.text = Text(tokenizer, ids, prompt.stop)
        self.seed = random.getrandbits(64) if prompt.seed is None else prompt.seed
        self.slot: int | None = None
        self.cached = 0  # how many of `ids` have keys and values
        self.written = 0  # how many places of the slot may be not zero

    @property
    def missing(self) -> int:
        """How many tokens have no keys and values yet. Computing the last one gives a new token."""
        return len(self.ids) - self.cached

    def draw(self) -> float:
        """A number in [0, 1) that depends on the seed and on the number of tokens only."""
        return random.Random(f"{self.seed} {len(self.tokens)}").random()  # noqa: S311  # no secret


class Text:
    """Text from tokens, one by one. It ends before a stop string."""

    def __init__(self, tokenizer: Any, before: Sequence[int], stop: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stop = stop
        self._held = ""  # may be the beginning of a stop string
        self.stopped = False
        # The last known tokens are decoded again: they decide whether a space follows.
        self._known: list[int] = list(before[-8:])
        self._new: list[int] = []
        self._length = len(self._decoded())  # of the text of the known tokens

    def _decoded(self) -> str:
        ids = self._known + self._new
        if self._tokenizer is None:
            return ""
        options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        return str(self._tokenizer.decode(ids, **options))

    def push(self, token: int) -> str:
        """Add a token; return the text that is complete now."""
        self._new.append(token)
        text = self._decoded()
        if len(text) <= self._length or text.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""  # the token is a special one, or a part of a character
        text = self._held + text[self._length :]
        self._known, self._new = self._new, []
        self._length = len(self._decoded())
        found = [text.index(stop) for stop in self._stop if stop in text]
        self.stopped = bool(found)
        sure = min(found) if found else len(text) - self._overlap(text)
        self._held = "" if found else text[sure:]
        return text[:sure]

    def rest(self) -> str:
        """Return the text that was held back, at the end: no stop string followed."""
        rest, self._held = self._held, ""
        return rest

    def _overlap(self, text: str) -> int:
        """How many characters at the end of `text` may begin a stop string."""
        longest = min(len(text), max(map(len, self._stop), default=1) - 1)
        for length in range(longest, 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stop):
                return length
        return 0
