"""The HTTP front: OpenAI's API over one gRPC stream a request. Thin: it decides nothing about a request."""
