"""What is told of the model and the server, in the words of OpenAI and of llama-server."""

from __future__ import annotations

import time

from starlette.responses import HTMLResponse, JSONResponse, Response

from skippy_mesh import __version__
from skippy_mesh.client import EngineClient
from skippy_mesh.gateway.chat import Tokenizer
from skippy_mesh.gateway.errors import ApiError
from skippy_mesh.gateway.refusals import Bounds
from skippy_mesh.gateway.rules import ApiRules
from skippy_mesh.gateway.schemas import DEFAULT_MAX_CHAT_TOKENS, GenerationBody

# Of a request's fields, those that llama-server's clients know, by its names.
_PARAMS = {
    "temperature": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p",
    "typical_p": "typical_p", "repeat_penalty": "repetition_penalty",
    "repeat_last_n": "repeat_last_n", "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty", "seed": "seed", "ignore_eos": "ignore_eos",
}  # fmt: skip
_HOME = """<!doctype html><title>skippy_mesh</title>
<h1>skippy_mesh {version}</h1>
<p>Serves <b>{model}</b> in the OpenAI API: <code>POST v1/chat/completions</code>,
<code>POST v1/completions</code>, <a href="v1/models">v1/models</a>.</p>
<p><a href="health">health</a> · <a href="ready">ready</a> · <a href="status">status</a> ·
<a href="metrics">metrics</a> · <a href="props">props</a></p>
"""


class About:
    """Cards and properties of one model. What a request and how many may have can change."""

    def __init__(
        self,
        model_name: str,
        tokenizer: Tokenizer,
        rules: ApiRules,
        *,
        engine: EngineClient,
        bounds: Bounds,
    ):
        self._names = (model_name, *rules.aliases)
        self._tokenizer = tokenizer
        self._rules = rules
        self._engine = engine
        self._bounds = bounds
        self._started_at = int(time.time())

    async def home(self) -> Response:
        return HTMLResponse(_HOME.format(version=__version__, model=self._names[0]))

    async def version(self) -> Response:
        return JSONResponse({"version": __version__})

    async def models(self) -> Response:
        return JSONResponse({"object": "list", "data": [self._card(name) for name in self._names]})

    async def model(self, name: str) -> Response:
        self.check_name(name)
        return JSONResponse(self._card(name))

    def check_name(self, name: str) -> None:
        """A 404 for a model that is not served."""
        if name not in self._names:
            raise ApiError(
                404,
                "model_not_found",
                f"no model of this name; this server serves {', '.join(map(repr, self._names))}",
                param="model",
            )

    async def props(self) -> Response:
        template = self._tokenizer.chat_template
        return JSONResponse({
            "default_generation_settings": {
                "n_ctx": self._engine.max_model_len, "params": self._default_params(),
            },
            "total_slots": self._bounds.ceiling.value,
            "model_alias": self._names[0],
            "model_path": self._rules.facts.get("file"),
            "modalities": {"vision": False, "audio": False, "video": False},
            "chat_template": template or "",
            "chat_template_caps": {"supports_tools": "tools" in (template or "")},
            "bos_token": self._tokenizer.bos_text,
            "eos_token": self._tokenizer.eos_text,
            "build_info": f"skippy_mesh-{__version__}",
            "is_sleeping": False,
            "endpoint_slots": False,
            "endpoint_props": False,
            "endpoint_metrics": True,
        })  # fmt: skip

    def _default_params(self) -> dict[str, object]:
        fields = GenerationBody.model_fields
        found = {name: fields[ours].default for name, ours in _PARAMS.items()}
        found |= {name: self._rules.defaults[ours] for name, ours in _PARAMS.items()
                  if ours in self._rules.defaults}  # fmt: skip
        return {**found, "n_predict": self._rules.max_chat_tokens or DEFAULT_MAX_CHAT_TOKENS}

    def _card(self, name: str) -> dict[str, object]:
        facts = self._rules.facts
        return {
            "id": name,
            "object": "model",
            "created": self._started_at,
            "owned_by": "skippy",
            "root": self._rules.tokenizer_id or name,
            "parent": None,
            "max_model_len": self._engine.max_model_len,
            "permission": [],
            "meta": {
                "n_vocab": self._tokenizer.num_tokens,
                "n_ctx": self._engine.max_model_len,
                "n_ctx_train": self._tokenizer.max_trained_tokens,
                **{key: facts[key] for key in ("n_embd", "n_params", "size", "ftype")
                   if key in facts},
            },
        }  # fmt: skip
