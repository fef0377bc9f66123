"""FastAPI that returns the request body: the upper limit for a service on FastAPI."""

from fastapi import FastAPI, Request, Response

from examples.benchmarks.servers.on_uvicorn import run

app = FastAPI()


@app.post("/predict")
async def predict(request: Request) -> Response:
    return Response(await request.body(), media_type="application/octet-stream")


if __name__ == "__main__":
    run(app)
