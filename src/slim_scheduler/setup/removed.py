"""Keys of the configuration that are gone, and what to do instead. `config.py` refuses them with that.

A key goes when nobody turns it: its value is then a constant where it is used.
"""

FIXED = "leave it out: {} is what everybody ran"

REMOVED = {
    "servers.num_gpus": "say resources = {GPU = 1} instead, with your number",
    "servers.patience_s": "set servers.N.batch_window_ms instead",
    "router.patience_s": "set servers.N.batch_window_ms instead",
    "router.patience_room": "set servers.N.batch_window_ms instead",
    "training.patience_room": "set servers.N.batch_window_ms instead",
    "dispatch.priority_aging_s": FIXED.format("1 s per priority"),
    "dispatch.max_retries": FIXED.format("3"),
    "dispatch.retry_budget": FIXED.format("0.2 of the arriving items"),
    "dispatch.loss_grace_s": "set dispatch.heartbeat_timeout_s: a block's grace is 2.5 times that",
    "router.probe_s": FIXED.format("1 s"),
    "router.slow_ms": FIXED.format("20 ms"),
    "cluster.hung_limit_s": FIXED.format("30 s"),
    "workload.day_s": 'leave it out: a day is the run\'s duration_s; for another shape use kind = "steps"',
    "workload.day_swing": 'leave it out: it is 0.5; for another shape use kind = "steps"',
    "training.hidden": FIXED.format("64"),
    "training.epochs": FIXED.format("the paper's 3"),
    "training.clip_coef": FIXED.format("the paper's 0.2"),
    "training.value_coef": FIXED.format("0.5"),
    "training.max_grad_norm": FIXED.format("0.5"),
    "training.learning_rate_schedule": FIXED.format("a cosine"),
    "training.returns": "set training.horizon_s for returns that look ahead; without it they are one step",
    "training.n_steps": "set training.horizon_s for returns that look ahead",
    "training.reward_weight": 'the recipe says it: training.recipe = "paper" or "planned"',
    "training.accuracy": 'the recipe says it: training.recipe = "paper" or "planned"',
    "training.minibatch": FIXED.format("1,024"),
    "training.gae_lambda": FIXED.format("0.95"),
    "training.checkpoint_updates": "leave it out: there is a checkpoint after every episode",
    "training.reward_scale": FIXED.format("the scale of the whole run"),
    "training.epsilon_max": 'the recipe says it: training.recipe = "paper" or "planned"',
    "training.epsilon_min": 'the recipe says it: training.recipe = "paper" or "planned"',
    "training.epsilon_decisions": FIXED.format("a fall over all decisions"),
}
