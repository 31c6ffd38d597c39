"""LangChain's standard unit tests for chat models; no network."""

from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_tests.unit_tests import ChatModelUnitTests

from ragcache_integrations.langchain import ChatRAGCache


class TestStandardUnit(ChatModelUnitTests):
    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatRAGCache

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"base_url": "http://127.0.0.1:1/v1", "model": "a-model"}

    @property
    def init_from_env_params(self) -> tuple[dict[str, str], dict[str, Any], dict[str, Any]]:
        return (
            {"RAGCACHE_BASE_URL": "http://127.0.0.1:1/v1", "RAGCACHE_API_KEY": "a-key", "OPENAI_API_KEY": "not-ours"},
            {"model": "a-model"},
            {"openai_api_base": "http://127.0.0.1:1/v1", "openai_api_key": "a-key", "model_name": "a-model"},
        )
