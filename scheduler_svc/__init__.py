"""The scheduler service: one queue, budgets, policies and a step planner for every worker."""
