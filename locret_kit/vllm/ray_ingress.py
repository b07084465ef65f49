"""Ray Serve LLM's ingress, where a stream whose replica dies ends with an error. Ray's own ends it as if it were whole."""

import json
from collections.abc import AsyncIterator

from ray.exceptions import RayError
from ray.serve.llm.ingress import OpenAiIngress


class Ingress(OpenAiIngress):
    """Takes requests, and passes them to replicas."""

    async def _get_response(self, **request: object) -> AsyncIterator[object]:
        """Pieces of an answer. Raises RayError: the replica died before the first."""
        begun = False
        try:
            async for piece in super()._get_response(**request):
                yield piece
                begun = True
        except RayError as error:
            if not begun:
                raise
            said = {"message": f"the replica failed: {type(error).__name__}", "type": "server_error", "code": 500}
            yield f"data: {json.dumps({'error': said})}\n\n"
