"""What of a request's metadata the server's process cannot send to the engine's."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from ragcache_core.vllm_plugin.compat import GracefulHTTPError, InputProcessor, MsgpackEncoder
from ragcache_core.wire import KEY, MAX_DOCUMENTS, check_depth, unsendable


class SendingInputProcessor(InputProcessor):
    """vLLM's last step before a request is sent, which sends word of metadata of ours that cannot be sent.

    JSON has halves of surrogate pairs and numbers of any size, MessagePack has not: vLLM would answer such a request
    with status 500, and never forget it. What is nested hundreds deep would end the engine, which pickles it for its
    workers. So the request is served, and the engine ignores and counts its metadata. What stands beside it and cannot
    be sent is left out: of what vLLM knows there, nothing is like that. More documents than the engine reads are
    refused. Elsewhere in a request such values are refused before (``request_body.py``).
    """

    _encoder: MsgpackEncoder

    @classmethod
    def take_over(cls, processor: InputProcessor) -> None:
        """Make ``processor`` one of this class, before its first request."""
        processor.__class__ = cls
        processor._encoder = MsgpackEncoder()

    def process_inputs(self, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the request as it is sent.

        Raises:
            GracefulHTTPError: too many documents.
        """
        sent = (getattr(params, "extra_args", None) or {}).get("kv_transfer_params")  # a pooling request has none
        if isinstance(sent, dict):
            _check_size(sent.get(KEY))
            for key, value in list(sent.items()):
                if (error := self._why_not(key, value)) is None:
                    continue
                if key == KEY:
                    sent[key] = unsendable(value, error)
                else:
                    del sent[key]
        return super().process_inputs(request_id, prompt, params, *args, **kwargs)

    def _why_not(self, key: str, value: object) -> Exception | None:
        """Return why one parameter cannot be sent, None if it can."""
        try:
            check_depth(value)
            self._encoder.encode({key: value})
        except (ValueError, OverflowError, RecursionError) as error:
            return error
        return None


def _check_size(metadata: object) -> None:
    documents = metadata.get("documents") if isinstance(metadata, dict) else None
    if isinstance(documents, list) and len(documents) > MAX_DOCUMENTS:
        raise GracefulHTTPError(
            f"the request lists {len(documents)} documents in kv_transfer_params, the engine reads {MAX_DOCUMENTS}: "
            "list the first of them",
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        )
