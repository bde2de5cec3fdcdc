"""The server that clients talk to: Open Inference Protocol v2 over HTTP and gRPC, metrics, and the live page."""
