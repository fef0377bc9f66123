"""FastAPI that answers with what it was sent: the most that a service over it can do."""

from fastapi import FastAPI, Request, Response

from examples.benchmarks.servers.on_uvicorn import run

app = FastAPI()


@app.post("/predict")
async def predict(request: Request) -> Response:
    return Response(await request.body(), media_type="application/octet-stream")


if __name__ == "__main__":
    run(app)
