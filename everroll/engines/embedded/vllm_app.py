"""The engine's second HTTP side: vLLM's token-level routes and those of its development mode that weights need."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from everroll.engines.embedded.app import EngineApp, json_response
from everroll.engines.embedded.sequence import Sequence
from everroll.engines.embedded.vllm_wire import (
    CompletionsBody,
    NewVersionBody,
    RpcBody,
    VllmGenerateBody,
    build_completions_answer,
    build_generate_answer,
    parse_pause_mode,
    to_generate,
)
from everroll.engines.embedded.wire import UpdateBody, parse_body

MODEL_NAME = "default"


class VllmApp:
    """Handlers over the same engine as `EngineApp`, which runs, queues and updates for both."""

    def __init__(self, handlers: EngineApp) -> None:
        self._handlers = handlers

    async def generate(self, request: Request) -> Response:
        body = to_generate(parse_body(VllmGenerateBody, await request.body()))

        def build(sequence: Sequence) -> Response:
            return json_response(build_generate_answer(body, sequence))

        return await self._handlers.run(request, body, build)

    async def completions(self, request: Request) -> Response:
        body = to_generate(parse_body(CompletionsBody, await request.body()).as_generate())

        def build(sequence: Sequence) -> Response:
            return json_response(build_completions_answer(body, sequence, MODEL_NAME))

        return await self._handlers.run(request, body, build)

    async def models(self, request: Request) -> Response:
        return json_response({"object": "list", "data": [{"id": MODEL_NAME, "object": "model"}]})

    async def pause(self, request: Request) -> Response:
        await self._handlers.core.pause(parse_pause_mode(request.query_params.get("mode", "abort")))
        return json_response({"status": "paused"})

    async def resume(self, request: Request) -> Response:
        await self._handlers.core.resume()
        return json_response({"status": "resumed"})

    async def is_paused(self, request: Request) -> Response:
        return json_response({"is_paused": (await self._handlers.core.inspect()).is_paused})

    async def weight_info(self, request: Request) -> Response:
        return json_response({"weight_version": str(self._handlers.core.weight_version)})

    async def collective_rpc(self, request: Request) -> Response:
        body = parse_body(RpcBody, await request.body())
        problem = await self._handlers.load(UpdateBody(model_path=body.arguments.weights_path))
        if problem is not None:
            return json_response({"error": {"message": problem}}, 500)
        return json_response({"results": [None]})

    async def update_version(self, request: Request) -> Response:
        version = parse_body(NewVersionBody, await request.body()).new_version
        await self._handlers.core.set_weight_version(int(version))
        return json_response({"success": True, "new_version": version})

    async def reset_prefix_cache(self, request: Request) -> Response:
        """Loading has emptied it already."""
        return Response()

    def routes(self) -> list[Route]:
        posts = {
            "/inference/v1/generate": self.generate,
            "/v1/completions": self.completions,
            "/pause": self.pause,
            "/resume": self.resume,
            "/collective_rpc": self.collective_rpc,
            "/update_weight_version": self.update_version,
            "/reset_prefix_cache": self.reset_prefix_cache,
        }
        gets = {"/v1/models": self.models, "/is_paused": self.is_paused, "/weight_info": self.weight_info}
        return [
            *(Route(path, handler, methods=["POST"]) for path, handler in posts.items()),
            *(Route(path, handler, methods=["GET"]) for path, handler in gets.items()),
        ]
