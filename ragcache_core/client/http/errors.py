"""Convert errors of HTTP requests to RAGCache's errors."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import httpx

from ragcache_core.errors import (
    EngineAuthError,
    EngineClosedError,
    EngineDiedError,
    EngineError,
    EngineTimeoutError,
    EngineUnreachableError,
    PromptTooLongError,
    RAGCacheError,
    RequestRejectedError,
)
from ragcache_core.wire import HUNG, check_text

ENGINE_DEAD_SIGNS = (
    "EngineCore encountered an issue",
    "EngineDeadError",
    "The server had an error while processing your request.",  # from 0.33 on
)
"""Errors of vLLM's server, with status 500 or inside a stream, after a crash of its engine process."""
_NO_TOOLS_SIGNS = ("requires --enable-auto-tool-choice", "requires --tool-call-parser")
"""Errors of a server started without a tool-call parser."""
_INTERNAL_SIGN = "Internal server error"
"""The error, with status 500 or inside a stream, of an answer that vLLM could not finish."""
_CONSTRAINTS = ("response_format", "structured_outputs")
_TOO_LONG_SIGNS = ("maximum context length", "maximum model length", "max_model_len", "longer than the maximum")
_MAX_TOKENS_SIGNS = ("max_tokens", "max_completion_tokens", "fewer output tokens")
# vLLM names these where the prompt fits and the answer does not.
_OPENAI_TYPES = (
    (EngineTimeoutError, "APITimeoutError"),
    (EngineAuthError, "AuthenticationError"),
    ((EngineUnreachableError, EngineDiedError, EngineClosedError), "APIConnectionError"),
    ((RequestRejectedError, PromptTooLongError), "BadRequestError"),
    (EngineError, "APIError"),
)
# The OpenAI SDK's type for an error that no exception of the SDK caused; the first match counts.
_NO_ATTRIBUTES = dict.fromkeys(("request", "response", "body", "code", "param", "type", "request_id"))


def reports_engine_death(text: str) -> bool:
    """Return whether a server's error message means that its engine process crashed."""
    return any(sign in text for sign in ENGINE_DEAD_SIGNS)


def hang_of(health: httpx.Response) -> str | None:
    """Return the reason that ``/health`` gives for a hang; ``None`` for other answers."""
    try:
        answer = health.json() if health.status_code == 503 else None
    except ValueError:
        return None
    match answer:
        case {"error": {"type": str(kind), "message": str(message)}} if kind == HUNG:
            return f"{message:.400}"
    return None


@contextmanager
def translate_errors() -> Iterator[None]:
    """Convert errors of httpx and the OpenAI SDK to RAGCache's; other exceptions pass.

    Raises:
        EngineAuthError, EngineDiedError, EngineTimeoutError, EngineUnreachableError, PromptTooLongError,
        RequestRejectedError, EngineError, ConfigError: see :mod:`ragcache_core.errors`.
    """
    try:
        yield
    except UnicodeEncodeError as error:  # of a body that no plan has looked at
        check_text(error.object, "the request")
        raise
    except Exception as error:
        # What no module has imported cannot have raised it.
        if isinstance(error, (httpx.HTTPError, getattr(sys.modules.get("openai"), "OpenAIError", ()))):
            raise translated(error) from error
        raise


@contextmanager
def translate_errors_as_openai() -> Iterator[None]:
    """Do :func:`translate_errors`, with each error also an instance of the OpenAI SDK's type.

    Handlers written for another model of the framework catch it then: ``except openai.APIConnectionError``.
    """
    try:
        with translate_errors():
            yield
    except (EngineError, PromptTooLongError) as error:
        _add_openai_type(error)
        raise


def _add_openai_type(error: RAGCacheError) -> None:
    import openai

    if isinstance(error, openai.OpenAIError):
        return
    kind: type[Exception] = getattr(openai, next(name for ours, name in _OPENAI_TYPES if isinstance(error, ours)))
    cause = error.__cause__
    if isinstance(cause, openai.OpenAIError):
        kind = kind if issubclass(kind, type(cause)) else type(cause)
        error.__dict__.update(vars(cause))
    error.__dict__["message"] = str(error)
    error.__class__ = _joined_type(type(error), kind)  # type: ignore[arg-type]  # classes are hashable


@cache
def _joined_type(ours: type[RAGCacheError], theirs: type[Exception]) -> type[RAGCacheError]:
    """Return a subclass of both types with the name of ``ours``, under which it is pickled."""
    names = {"__module__": ours.__module__, "__qualname__": ours.__qualname__, "__doc__": ours.__doc__}
    return type(ours.__name__, (ours, theirs), {**_NO_ATTRIBUTES, **names, "__reduce__": lambda e: (ours, e.args)})


def translated(error: Exception) -> RAGCacheError:
    """Return RAGCache's error for one of httpx or of the OpenAI SDK."""
    for cause in _causes(error):
        if isinstance(cause, RAGCacheError):
            return cause
    return _of_httpx(error) if isinstance(error, httpx.HTTPError) else _of_openai(error)


def _of_httpx(error: httpx.HTTPError) -> RAGCacheError:
    match error:
        case httpx.TimeoutException():
            return _timed_out(error)
        case httpx.ConnectError():
            return _unreachable(error)
        case httpx.HTTPStatusError():
            return EngineError(f"the engine at {_address(error)} answered {error.response.status_code}: {error}")
    return EngineDiedError(f"the connection to the engine broke during an answer ({error}): send the request again")


def _timed_out(error: Exception) -> EngineTimeoutError:
    return EngineTimeoutError(f"the engine did not answer in time ({error}): raise the timeout or its load")


def _unreachable(error: Exception) -> EngineUnreachableError:
    detail = error.__cause__ or error
    return EngineUnreachableError(
        f"no engine answers at {_address(error)} ({detail}): is the server running, and the URL right?"
    )


def _of_openai(error: Exception) -> RAGCacheError:
    import openai

    message = str(error)
    match error:
        case openai.APITimeoutError():
            return _timed_out(error)
        case openai.APIConnectionError():
            return _unreachable(error)
        case openai.AuthenticationError() | openai.PermissionDeniedError():
            return EngineAuthError(f"the engine at {_address(error)} refused the API key: pass the server's api_key")
        case openai.BadRequestError() if any(sign in message for sign in _TOO_LONG_SIGNS):
            fix = "Lower max_tokens" if any(s in message for s in _MAX_TOKENS_SIGNS) else "Retrieve fewer documents"
            return PromptTooLongError(f"{message} {fix}, or launch with a larger max_model_len.")
        case openai.BadRequestError() if any(sign in message for sign in _NO_TOOLS_SIGNS):
            return RequestRejectedError(
                "the engine was started without tools: start it with --enable-auto-tool-choice --tool-call-parser and "
                "the parser of the model's family, `ragcache serve MODEL -- --enable-auto-tool-choice "
                "--tool-call-parser hermes` or Engine.launch(MODEL, enable_auto_tool_choice=True, "
                "tool_call_parser='hermes'); docs/guides/tools.md names the parsers"
            )
        case openai.BadRequestError() | openai.NotFoundError() | openai.UnprocessableEntityError():
            return RequestRejectedError(f"the engine refused the request: {message}")
        case openai.LengthFinishReasonError():
            return RequestRejectedError("the answer was cut by max_tokens before it was whole: raise max_tokens")
    if _INTERNAL_SIGN in message and _is_constrained(error):
        return EngineError(
            "the engine ended an answer that has to follow a grammar (of tool_choice, response_format or a schema): "
            "most likely the model's tokens cannot spell what comes next in it; the server's log says more. Ask "
            "without (tool_choice='auto', or in LlamaIndex a selector of text, LLMSingleSelector), or serve another "
            "model"
        )
    if reports_engine_death(message):
        return EngineDiedError(
            "the engine died during an answer, after its first token, and RAGCache did not repeat the request: send "
            "the request again"
        )
    return EngineError(f"the engine failed: {message}")


def _is_constrained(error: Exception) -> bool:
    """Return whether the failed request required structured output."""
    try:
        body = json.loads(error.request.content)  # type: ignore[attr-defined]
        return body.get("tool_choice", "auto") not in ("auto", "none") or any(map(body.get, _CONSTRAINTS))
    except (AttributeError, RuntimeError, ValueError):  # no request at hand, or one without JSON
        return False


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__


def _address(error: Exception) -> str:
    try:
        url = error.request.url  # type: ignore[attr-defined]
    except (AttributeError, RuntimeError):
        return "its address"
    return f"{url.scheme}://{url.netloc.decode()}"
