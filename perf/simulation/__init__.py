"""A discrete-event model of replicas behind a balancer: traffic.py asks, replica.py works, events.py keeps the time."""
