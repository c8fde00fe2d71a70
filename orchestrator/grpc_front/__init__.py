"""The gRPC front: the part of Triton's gRPC service that strangers may use."""
