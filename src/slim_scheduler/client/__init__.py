"""Clients of a running server: a typed client, and the load generator behind `slim load`."""

from slim_scheduler.client.client import AsyncSlimClient, Constraints, Prediction, RefusedError, SlimClient

__all__ = ["AsyncSlimClient", "Constraints", "Prediction", "RefusedError", "SlimClient"]
