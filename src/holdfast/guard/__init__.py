"""People before jobs: guards that allow, ask or deny, and the approvals that they, or tasks, wait for."""
