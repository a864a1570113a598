"""Guards that allow, deny or require approval of jobs, and approval requests of guards and tasks."""
