"""What bounds the dispatcher."""

import msgspec

from slim_scheduler.core.queues import PRIORITY_AGING
from slim_scheduler.core.types import Bytes, Seconds

SLOW_ROUTER: Seconds = 0.02  # a decision that takes longer suspends the router


class DispatchLimits(msgspec.Struct, frozen=True):
    """What bounds the dispatcher, in the core's units (`DispatchConfig` says what each is)."""

    reentry_back: bool = True
    max_waiting_items: int = 100_000
    max_activation_bytes: Bytes = 2 << 30
    home_matters: bool = False
    priority_aging: Seconds = PRIORITY_AGING
    max_retries: int = 3
    retry_budget: float = 0.2
    heartbeat_timeout: Seconds = 0.8
    loss_grace: Seconds = 2.0
    no_server_timeout: Seconds = 30.0
    slow_router: Seconds = SLOW_ROUTER
    router_probe: Seconds = 1.0
    batch_windows: bool = False  # some server has one, and wants to know what may follow a block
