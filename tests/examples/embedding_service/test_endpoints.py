"""What the service answers, against the model itself."""

import pytest
import torch

from .conftest import Reference, corpus
from .service import CORPUS_SIZE, Service, asking, embeddings_of

TEXTS = [
    "A file is closed.",
    "Ein Satz in einer anderen Sprache, und ein wenig länger: 文も。",
    "\ufeff\u0085",  # white space to some, but not to JSON
    "word " * 1_500,  # beyond 256 tokens
]


@pytest.mark.parametrize("path", ["/v1/embeddings", "/embed/stream"])
def test_each_text_has_its_embedding(service: Service, reference: Reference, path: str) -> None:
    embeddings = embeddings_of(service.post(path, asking(path, TEXTS)))
    reference.check(TEXTS, embeddings)
    lengths = torch.tensor(embeddings).norm(dim=1)
    torch.testing.assert_close(lengths, torch.ones(len(TEXTS)))


def test_similarities_are_cosines(service: Service, reference: Reference) -> None:
    source, *texts = ["The cat sits on the mat.", "A kitten rests on a rug.", "Shares fell today."]
    scores = service.post("/similarity", {"source": source, "texts": texts}).json()["scores"]
    expected = reference(texts) @ reference([source])[0]
    torch.testing.assert_close(torch.tensor(scores), expected, rtol=1e-4, atol=1e-5)
    assert scores[0] > 0.5 > scores[1]


def test_a_search_finds_what_means_the_same(service: Service, reference: Reference) -> None:
    query = "A name was looked up and does not exist: which error?"
    found = service.post("/search", {"query": query, "limit": 3.0}).json()
    hits = found["hits"]
    scores = reference([text for text, _ in corpus()]) @ reference([query])[0]
    best = scores.topk(3)
    assert [(hit["text"], hit["module"]) for hit in hits] == [
        corpus()[index] for index in best.indices.tolist()
    ]
    assert found["searched"] == CORPUS_SIZE
    found_scores = torch.tensor([hit["score"] for hit in hits])
    torch.testing.assert_close(found_scores, best.values, rtol=1e-4, atol=1e-5)


def test_no_more_is_found_than_there_is(service: Service) -> None:
    assert len(service.post("/search", {"query": "x", "limit": 50}).json()["hits"]) == CORPUS_SIZE


def test_it_says_how_it_is(service: Service) -> None:
    with service.client() as client:
        assert client.get("/healthz").json() == {"status": "alive"}
        assert client.get("/readyz").json() == {"status": "ready"}
        assert client.get("/docs").status_code == 200
        paths = client.get("/openapi.json").json()["paths"]
    assert {path for path in paths if not path.startswith("/v1/")} == {
        "/embed/stream",
        "/search",
        "/similarity",
    }
    assert {"/v1/embeddings", "/v1/models"} <= set(paths)
