"""`python -m perf`: measurements against the budgets, from a checkout; README.md defines every number."""
