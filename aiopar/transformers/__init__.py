"""Language models of transformers for `ContinuousBatcher` (extra `transformers`)."""

try:
    from ._causal_lm import CausalLM
except ModuleNotFoundError as error:
    if error.name != "transformers":
        raise
    raise ImportError(
        "aiopar.transformers needs transformers: pip install 'aiopar[transformers]'"
    ) from error
from ._request import Completion, Prompt, Token

__all__ = ["CausalLM", "Completion", "Prompt", "Token"]


def __dir__() -> list[str]:
    return __all__
