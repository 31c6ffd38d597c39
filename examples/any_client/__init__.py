"""Plain clients of the OpenAI protocol, in which only the base URL names a server with RAGCache.

``curl.sh`` registers ``documents.json`` with the server. Afterwards each client shows some of these documents twice,
and prints how many prompt tokens were cached. All read ``BASE_URL`` and ``API_KEY``.
"""
