"""Training a router in simulation: episodes, the Gymnasium environment, PPO, and policies on disk."""
