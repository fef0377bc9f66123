"""The corpus, a few modules of it: killed in the middle it ends up as if it had not been."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from examples import embed_corpus
from examples.quickstart import SentenceEncoder

pytestmark = pytest.mark.timeout(300)  # each run imports transformers and runs a real model

# Killed, as by `kill -9`, in the third window: half way through its file, or before it is known.
_PROGRAM = """
import json, os, signal, sys
from types import SimpleNamespace
from examples import embed_corpus

embed_corpus.WINDOW, embed_corpus.BATCH = 8, 4
calls = []

def kill_at_third(original):
    def call(*args):
        calls.append(args)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args)
    return call

if sys.argv[2] == "file":
    os.fsync = kill_at_third(os.fsync)
elif sys.argv[2] == "state":
    embed_corpus.json = SimpleNamespace(dumps=kill_at_third(json.dumps), loads=json.loads)
embed_corpus.main(["--files", "12", "--out", sys.argv[1]])
"""


def run(out: Path, *, killed_in: str = "nothing") -> tuple[int, str]:
    finished = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(out), killed_in],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        timeout=250,
        check=False,
    )
    return finished.returncode, finished.stdout


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    out = tmp_path_factory.mktemp("corpus") / "unbroken.safetensors"
    code, printed = run(out)
    assert code == 0
    assert "is the bottleneck" in printed
    return out.read_bytes()


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL")
@pytest.mark.parametrize("killed_in", [pytest.param("file", marks=pytest.mark.slow), "state"])
def test_killed_in_the_middle_it_goes_on_and_ends_up_the_same(
    killed_in: str, unbroken: bytes, tmp_path: Path
) -> None:
    out = tmp_path / "corpus.safetensors"
    assert run(out, killed_in=killed_in) == (-signal.SIGKILL, "")
    assert not out.exists()
    code, printed = run(out)
    assert code == 0
    assert "continuing after 2 windows" in printed
    assert out.read_bytes() == unbroken
    assert list(tmp_path.iterdir()) == [out]


def test_rows_are_the_paragraphs_in_order(tmp_path: Path) -> None:
    out = tmp_path / "corpus.safetensors"
    embed_corpus.main(["--files", "1", "--out", str(out)])
    [path] = embed_corpus.python_files(1)
    texts = embed_corpus.paragraphs(path.read_bytes())
    rows = load_file(out)["embeddings"]
    assert len(rows) == len(texts) > 1
    torch.testing.assert_close(rows, SentenceEncoder().embed(texts))


def test_the_corpus_is_large_and_its_order_is_fixed() -> None:
    files = embed_corpus.python_files(None)
    assert files == sorted(files)
    assert len(files) > 500
    some = [embed_corpus.paragraphs(path.read_bytes()) for path in files[::50]]
    assert sum(map(len, some)) * 50 > 5000
    assert all(len(text) >= 60 and text == " ".join(text.split()) for page in some for text in page)
