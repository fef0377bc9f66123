"""The corpus, a few modules of it: killed in the middle it ends up as if it had not been."""

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from examples import embed_corpus
from examples.quickstart import SentenceEncoder

# Killed, as by `kill -9`, in the third window: half way through its file, or before it is known.
# The imports take seconds: each run is a fork of one process that has done them.
_PROGRAM = """
import json, os, signal, sys
from types import SimpleNamespace
import transformers.models.bert.modeling_bert
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

def run(out, killed_in, workers):
    if killed_in == "file":
        os.fsync = kill_at_third(os.fsync)
    elif killed_in == "state":
        embed_corpus.json = SimpleNamespace(dumps=kill_at_third(json.dumps), loads=json.loads)
    embed_corpus.main(["--files", "12", "--out", out, "--workers", workers])

for number, (out, killed_in, workers) in enumerate(zip(*[iter(sys.argv[1:])] * 3)):
    if not (child := os.fork()):
        run(out, killed_in, workers)
        break
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(f"run {number} ended with {code}, {os.path.exists(out)}", flush=True)
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL")
@pytest.mark.parametrize(
    ("killed_in", "workers"),
    [
        pytest.param("file", "threads", marks=pytest.mark.slow),
        ("state", "threads"),
        pytest.param("state", "processes", marks=pytest.mark.slow),
    ],
)
def test_killed_in_the_middle_it_goes_on_and_ends_up_the_same(
    killed_in: str, workers: str, tmp_path: Path
) -> None:
    out, unbroken = tmp_path / "corpus.safetensors", tmp_path / "unbroken.safetensors"
    runs: list[str | Path] = [out, killed_in, workers, out, "nothing", workers]
    runs += [unbroken, "nothing", "threads"]
    finished = subprocess.run(
        [sys.executable, "-c", _PROGRAM, *map(str, runs)],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        timeout=250,
        check=True,
    )
    killed, continued, whole = re.split(r"run \d ended with ", finished.stdout)[:3]
    assert killed == ""
    assert continued.startswith("-9, False\n")
    assert "continuing after 2 windows" in continued
    assert whole.startswith("0, True\n")
    assert "is the bottleneck" in whole
    assert out.read_bytes() == unbroken.read_bytes()
    assert {*tmp_path.iterdir()} == {out, unbroken}


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
