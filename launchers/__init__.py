"""Login-node side: submits allocations, follows them, recovers them."""
