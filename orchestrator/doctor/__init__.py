"""`python -m orchestrator doctor`: is this artifact whole, and is this the machine for it? `serve` asks it first."""
