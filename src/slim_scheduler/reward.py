"""The reward of a block, eq. 7, for summaries and training; the formula is the core's, whose routers use it too."""

from slim_scheduler.core.reward import block_reward, undone_reward

__all__ = ["block_reward", "undone_reward"]
