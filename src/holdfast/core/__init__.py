"""Pure decisions, without any I/O: states, jobs, retry policy, verdicts, codec."""
