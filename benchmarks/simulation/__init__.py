"""What policies, orders and queues bring in virtual time."""
