"""What keeps the store in order: promoter, reclaimer, pruner. Any number of processes may run them at once."""
