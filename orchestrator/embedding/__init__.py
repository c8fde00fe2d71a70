"""Sentences as vectors: what the models `embedding_*` and `/v1/embeddings` do, apart from Triton and HTTP."""
