"""The OpenAPI document. What bodies may hold is said by the models that check them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic.json_schema import models_json_schema

from skippy_mesh import __version__
from skippy_mesh.gateway.body import Body
from skippy_mesh.gateway.generation import AbortBody
from skippy_mesh.gateway.schemas import ChatBody, CompletionBody
from skippy_mesh.gateway.texts import DetokenizeBody, TokenizeBody, TokenizeChat

_REF = "#/components/schemas/{model}"
_BODIES: Mapping[str, tuple[type[Body], ...]] = {
    "/v1/chat/completions": (ChatBody,),
    "/v1/completions": (CompletionBody,),
    "/v1/abort": (AbortBody,),
    "/tokenize": (TokenizeBody, TokenizeChat),
    "/detokenize": (DetokenizeBody,),
    "/apply-template": (TokenizeChat,),
}
_PAGES = {
    "/health": "whether requests are served",
    "/ready": "whether a token has come through all stages of late",
    "/livez": "whether the server answers",
    "/metrics": "metrics in Prometheus text format",
    "/status": "the mesh on one page",
    "/props": "the model's properties, as llama-server names them",
    "/version": "the version",
    "/v1/models": "the model's cards",
}
_ERROR: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "string"},
            },
        }
    },
}
_REFUSALS = {
    "400": "the body cannot be served as it is",
    "401": "a key is needed",
    "404": "there is no such model",
    "413": "the body is too large",
    "429": "come back later",
    "500": "the server failed",
    "503": "nothing is served just now",
    "504": "it took too long",
}


def document() -> dict[str, Any]:
    kinds = {kind for kinds in _BODIES.values() for kind in kinds}
    by_name = sorted(kinds, key=lambda kind: kind.__name__)
    refs, schemas = models_json_schema(
        [(kind, "validation") for kind in by_name], ref_template=_REF
    )
    paths: dict[str, Any] = {path: {"get": _operation(text)} for path, text in _PAGES.items()}
    for path, bodies in _BODIES.items():
        found = [refs[kind, "validation"] for kind in bodies]
        schema = found[0] if len(found) == 1 else {"anyOf": found}
        content = {"application/json": {"schema": schema}}
        paths[path] = {"post": {
            **_operation("as the OpenAI API, vLLM or llama-server has it"),
            "requestBody": {"required": True, "content": content},
        }}  # fmt: skip
    return {
        "openapi": "3.1.0",
        "info": {"title": "skippy_mesh", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": {**schemas["$defs"], "Error": _ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _operation(text: str) -> dict[str, Any]:
    error = {"application/json": {"schema": {"$ref": _REF.format(model="Error")}}}
    refusals = {
        code: {"description": reason, "content": error} for code, reason in _REFUSALS.items()
    }
    return {"summary": text, "responses": {"200": {"description": "done"}, **refusals}}
