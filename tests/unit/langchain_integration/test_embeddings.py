from typing import Any

import numpy as np
import pytest
from langchain_core.embeddings import Embeddings
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_tests.integration_tests import EmbeddingsIntegrationTests
from langchain_tests.unit_tests import EmbeddingsUnitTests

from ragcache_core.errors import ConfigError
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


def test_a_question_is_nearest_to_the_text_that_shares_its_words() -> None:
    store = InMemoryVectorStore.from_texts(TEXTS, TfidfSvdEmbeddings(TEXTS))
    assert store.similarity_search("which star is it?", k=1)[0].page_content == TEXTS[1]


def test_a_text_has_one_vector_whichever_way_it_is_embedded() -> None:
    embeddings = TfidfSvdEmbeddings(TEXTS)
    np.testing.assert_array_equal(embeddings.embed_documents(TEXTS), [embeddings.embed_query(t) for t in TEXTS])


def test_no_texts_to_fit_on_are_refused() -> None:
    with pytest.raises(ConfigError):
        TfidfSvdEmbeddings([])
