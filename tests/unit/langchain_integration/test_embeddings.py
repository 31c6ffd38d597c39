from typing import Any

from langchain_core.embeddings import Embeddings
from langchain_tests.integration_tests import EmbeddingsIntegrationTests
from langchain_tests.unit_tests import EmbeddingsUnitTests

from ragcache_integrations.langchain import TfidfSvdEmbeddings

TEXTS = ["foo and bar", "the sun is a star", "the moon goes around the earth"]


class TestStandardUnit(EmbeddingsUnitTests):
    @property
    def embeddings_class(self) -> type[Embeddings]:
        return TfidfSvdEmbeddings

    @property
    def embedding_model_params(self) -> dict[str, Any]:
        return {"texts": TEXTS, "dimension": 16}


class TestStandardIntegration(EmbeddingsIntegrationTests):
    @property
    def embeddings_class(self) -> type[Embeddings]:
        return TfidfSvdEmbeddings

    @property
    def embedding_model_params(self) -> dict[str, Any]:
        return {"texts": TEXTS, "dimension": 16}
